// Backward of multi-head attention, head group by head group: q, k and v of the group are projected
// again, exactly as forward did, then differentiated; gradients of its weights are final, those of
// the inputs are sums over groups. Fixed order, no atomics: the same bits every time.
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../attention_calls.h"
#include "../mlp_calls.h"
#include "checks.h"
#include "heads.h"
#include "mha_gradients.h"

namespace fused_remat {

using at::Tensor;

namespace {

using Residuals = std::array<OptionalTensor, kMhaResiduals>;

class BackwardPass : MhaGradients {
 public:
  BackwardPass(
      const MhaProblem& problem, const Tensor& dy, const OptionalTensor& dweights,
      const Residuals& kept, const Tensor& lse, const Wanted& wanted, const Wanted& wide)
      : MhaGradients(problem, wanted, wide), kept_(kept), lse_(lse), dy_(p_.rows_of(dy, kQ)) {
    if (dweights) take_dweights(*dweights);
    masks_.dattn_mask =
        mask_gradient_sum(p_.attending.attn_mask, wanted_[kAttnMask], p_.precision.accumulate);
    masks_.dkey_mask =
        mask_gradient_sum(p_.attending.key_mask, wanted_[kKeyMask], p_.precision.accumulate);
    take_buffers();
  }

  Gradients run() {
    for_each_group([&](const MhaGroup& g) { run_group(g); });
    finish_inputs();
    finish_sums();
    if (wanted_[kAttnMask])
      gradients_[kAttnMask] = masks_.dattn_mask.to(p_.operands.attn_mask->scalar_type());
    if (wanted_[kKeyMask])
      gradients_[kKeyMask] = masks_.dkey_mask.view({sizes_.batch, sizes_.length_k})
                                 .to(p_.operands.key_mask->scalar_type());
    return gradients_;
  }

 private:
  void take_dweights(const Tensor& dweights) {
    Tensor d = dweights.to(p_.precision.accumulate);
    if (d.stride(-1) != 1) d = d.contiguous();
    const bool averaged = d.dim() == 3;
    weights_gradient_.dweights = averaged ? d.unsqueeze(1) : d;
    weights_gradient_.factor = averaged ? 1.0 / static_cast<double>(sizes_.heads) : 1.0;
  }

  void take_buffers() {
    const at::ScalarType wide = p_.precision.accumulate;
    const int64_t rows_q = sizes_.batch * sizes_.length_q;
    const int64_t out_columns = p_.plan.kv_heads * sizes_.repeats() * sizes_.value_width;
    const bool sums_weights = p_.operands.w_q.scalar_type() != wide;
    for (int part = 0; part < kParts; ++part) {
      const int64_t elements = sizes_.batch * sizes_.full_length(part) * most_columns(part);
      gradient_buffers_[part] = take(part_wanted_[part], elements, wide);
      weight_sums_[part] =
          take(sums_weights, most_columns(part) * p_.projections[part].features(), wide);
    }
    dout_buffer_ = take(true, rows_q * out_columns, p_.precision.compute);
    out_buffer_ = take(!kept_[kResidualOut], rows_q * out_columns, p_.precision.compute);
    w_out_sum_ = take(sums_weights, sizes_.d_out * out_columns, wide);
    const int64_t row_numbers =
        sizes_.batch * p_.plan.kv_heads * sizes_.repeats() * sizes_.length_q;
    delta_buffer_ = take(true, row_numbers, wide);
    correction_buffer_ = take(true, row_numbers, wide);
    // Rows of dy that do not lie ready pass through a buffer of their own, which no product of
    // forward depends on.
    dy_ready_ = dy_.scalar_type() == p_.precision.gemm && has_dense_rows(dy_);
    dy_step_ = p_.plan.rows;
    if (dy_ready_) return;
    const int64_t row = sizes_.d_out * static_cast<int64_t>(c10::elementSize(p_.precision.gemm));
    dy_step_ =
        std::clamp<int64_t>(p_.attending.scratch / std::max<int64_t>(row, 1), 1, p_.plan.rows);
    dy_buffer_ = at::empty({dy_step_ * sizes_.d_out}, dy_.options().dtype(p_.precision.gemm));
  }

  void run_group(const MhaGroup& g) {
    load_weights(g);
    Residuals parts = kept_;
    make_heads(g, parts, nullptr);
    const int64_t columns = g.heads * sizes_.value_width, rows = dy_.size(0);
    const Tensor dout_rows = matrix(dout_buffer_, rows, columns);
    for_each_dy([&](int64_t r0, const Tensor& dy) {
      if (out_adapter_ && is_first(g)) out_adapter_.begin_rows(dy, r0);
      make_dout(g, r0, dy, dout_rows.narrow(0, r0, dy.size(0)));
    });
    const Tensor out_rows = kept_[kResidualOut]
                                ? p_.rows_of(kept_[kResidualOut]->flatten(2), kQ)
                                      .narrow(1, g.head0 * sizes_.value_width, columns)
                                : matrix(out_buffer_, rows, columns);
    differentiate(g, dout_rows, out_rows);
    out_projection(g, out_rows);
    for (int part = 0; part < kParts; ++part)
      if (part_wanted_[part]) finish_heads(g, part);
    for (int input = 0; input < kParts; ++input) input_projections(g, input);
  }

  template <class Body>
  void for_each_dy(const Body& body) {
    for (int64_t r0 = 0; r0 < dy_.size(0); r0 += dy_step_) {
      const Tensor part = dy_.narrow(0, r0, std::min(dy_step_, dy_.size(0) - r0));
      body(r0, packed(part, dy_buffer_));
    }
  }

  // to <- the gradient of the rows of out from r0 on, rounded once.
  void make_dout(const MhaGroup& g, int64_t r0, const Tensor& dy, const Tensor& to) {
    const bool direct = to.scalar_type() == dy.scalar_type();
    Tensor product = direct ? to : matrix(factor_buffer_, to.size(0), to.size(1));
    add_product(product, dy, w_out_, /*first=*/true, {});
    if (out_adapter_) out_adapter_.add_dx(product, r0, g.head0 * sizes_.value_width);
    if (!direct) Tensor(to).copy_(product);
  }

  void differentiate(const MhaGroup& g, const Tensor& dout_rows, const Tensor& out_rows) {
    const std::string& backend = p_.options.backend;
    const Attending attending = group_of(p_.attending, g.head0, g.heads);
    WeightsGradient weights = weights_gradient_;
    if (weights.dweights) weights.dweights = head_slice(*weights.dweights, g.head0, g.heads);
    const Tensor lse = lse_.narrow(1, g.head0, g.heads);
    const Tensor dout = p_.heads_of(dout_rows, kQ, sizes_.length_q, sizes_.value_width);
    const Tensor out = p_.heads_of(out_rows, kQ, sizes_.length_q, sizes_.value_width);
    const auto rows = [&](const Tensor& flat) {
      return flat.narrow(0, 0, sizes_.batch * g.heads * sizes_.length_q)
          .view({sizes_.batch, g.heads, sizes_.length_q});
    };
    const Tensor delta = rows(delta_buffer_), correction = rows(correction_buffer_);
    calls::attention_delta(
        backend, heads_[kQ], heads_[kK], heads_[kV], attending, lse, dout, weights,
        /*rebuild=*/!kept_[kResidualOut], out, delta, correction);
    AttentionGradients to = masks_;
    if (to.dattn_mask.defined()) to.dattn_mask = head_slice(to.dattn_mask, g.head0, g.heads);
    Tensor* const wide[] = {&to.dq, &to.dk, &to.dv};
    bool any = to.dattn_mask.defined() || to.dkey_mask.defined();
    for (int part = 0; part < kParts; ++part) {
      if (!part_wanted_[part]) continue;
      any = true;
      gradient_rows_[part] = part_rows(gradient_buffers_[part], g, part);
      gradient_rows_[part].zero_();
      *wide[part] = p_.heads_of(
          gradient_rows_[part], part, sizes_.full_length(part), sizes_.part_width(part));
    }
    if (any)
      calls::attention_bwd(
          backend, heads_[kQ], heads_[kK], heads_[kV], attending, lse, correction, delta, dout,
          weights.dweights ? std::nullopt : OptionalTensor(out), weights, to);
  }

  void out_projection(const MhaGroup& g, const Tensor& out_rows) {
    if (wanted_[kBout] && g.kv0 == 0)
      for_each_dy([&](int64_t, const Tensor& dy) {
        calls::column_sums(p_.options.backend, dy, sums_[kBout]);
      });
    if (!wanted_[kWout] && !out_adapter_.da.defined() && !out_adapter_.db.defined()) return;
    const int64_t first = g.head0 * sizes_.value_width;
    Tensor to, sum;
    if (wanted_[kWout]) {
      to = gradients_[kWout].narrow(1, first, out_rows.size(1));
      sum = weight_sum(to, w_out_sum_);
    }
    for_each_dy([&](int64_t r0, const Tensor& dy) {
      const int64_t n = dy.size(0);
      const Tensor out = packed_factor(out_rows.narrow(0, r0, n));
      if (sum.defined()) add_product(sum, dy.t(), out, /*first=*/r0 == 0, product_buffer_);
      out_adapter_.differentiate_a(out, r0, first, product_buffer_);
      if (!out_adapter_.db.defined()) return;
      out_adapter_.reduce(out, r0, first, product_buffer_);
      if (is_last(g))
        out_adapter_.differentiate_b(dy, packed_factor(out_adapter_.low(r0, n)), product_buffer_);
    });
    if (!sum.defined()) return;
    if (!sum.is_same(to)) Tensor(to).copy_(sum);
    if (out_rows.size(0) == 0) Tensor(to).zero_();
  }

  Tensor weight_sum(const Tensor& to, const Tensor& flat) const {
    const bool direct = !flat.defined() || to.scalar_type() == p_.precision.accumulate;
    return direct ? to : matrix(flat, to.size(0), to.size(1));
  }

  // From the gradient of what attention took to that of the projection, and of the extra keys.
  void finish_heads(const MhaGroup& g, int part) {
    const Tensor heads =
        p_.heads_of(gradient_rows_[part], part, sizes_.full_length(part), sizes_.part_width(part));
    const MhaOperand bias = part == kK ? kBiasK : kBiasV;
    if (part != kQ && wanted_[bias])
      sums_[bias]
          .view({sizes_.kv_heads, sizes_.part_width(part)})
          .narrow(0, g.kv0, g.kv_heads)
          .add_(heads.select(2, sizes_.length_k).sum({0}));
    if (p_.transforms[part])
      calls::transform_heads_backward(
          p_.options.backend, heads.narrow(2, 0, sizes_.part_length(part)), raw_[part],
          p_.transforms[part], p_.attending.scratch, sums_[part == kQ ? kQNorm : kKNorm]);
  }

  // What the parts that share an input give to it, to their weights and to their biases.
  void input_projections(const MhaGroup& g, int input) {
    std::vector<int> parts;
    std::array<Tensor, kParts> sums;
    for (int part = 0; part < kParts; ++part) {
      if (p_.projections[part].input != input || !part_wanted_[part]) continue;
      parts.push_back(part);
      if (weight_gradients_[part].defined())
        sums[part] = weight_sum(group_rows(g, part, weight_gradients_[part]), weight_sums_[part]);
    }
    if (parts.empty()) return;
    for_each_chunk(input, [&](int64_t r0, int64_t n, int64_t with_extra) {
      Tensor x;
      const auto chunk = [&] {
        if (!x.defined()) x = input_chunk(input, r0, n);
        return x;
      };
      const Tensor dx =
          input_sums_[input].defined() ? input_sums_[input].narrow(0, r0, n) : Tensor();
      for (const int part : parts) {
        const Tensor d = gradient_rows_[part].narrow(0, part == kQ ? r0 : with_extra, n);
        if (bias_sums_[part].defined())
          calls::column_sums(p_.options.backend, d, group_rows(g, part, bias_sums_[part]));
        const Tensor factor = packed_factor(d);
        if (sums[part].defined())
          add_product(sums[part], factor.t(), chunk(), /*first=*/r0 == 0, product_buffer_);
        if (dx.defined()) add_product(dx, factor, weights_[part], /*first=*/false, product_buffer_);
        if (adapters_[part]) differentiate_adapter(g, part, r0, factor, chunk, dx);
      }
    });
    for (const int part : parts) {
      if (!sums[part].defined()) continue;
      Tensor to = group_rows(g, part, weight_gradients_[part]);
      if (sizes_.batch * sizes_.part_length(part) == 0)
        to.zero_();
      else if (!sums[part].is_alias_of(to))
        to.copy_(sums[part]);
    }
  }

  // What `factor`, rows of dq, dk or dv, gives to the adapter, and the adapter to dx.
  template <class Chunk>
  void differentiate_adapter(
      const MhaGroup& g, int part, int64_t r0, const Tensor& factor, const Chunk& input_chunk,
      const Tensor& dx) {
    InputAdapter& adapter = adapters_[part];
    // Where q, k or v were kept nothing has made `low` yet.
    if (kept_[part] && adapter.db.defined() && is_first(g)) adapter.reduce(input_chunk(), r0);
    adapter.take(factor, r0, first_column(g, part), dx.defined(), product_buffer_);
    const Tensor dlow = is_last(g) ? adapter.dlow(r0, factor.size(0)) : Tensor();
    if (!dlow.defined()) return;
    const Tensor x = adapter.da.defined() ? input_chunk() : Tensor();
    adapter.give(packed_factor(dlow), x, dx, product_buffer_);
  }

  Tensor group_rows(const MhaGroup& g, int part, const Tensor& of) const {
    return of.narrow(0, g.first(part) * sizes_.part_width(part), p_.group_columns(g, part));
  }

  void finish_inputs() {
    for (int part = 0; part < kParts; ++part) {
      if (!input_sums_[part].defined()) continue;
      if (p_.inputs[part].normalized)
        for_each_chunk(part, [&](int64_t r0, int64_t n, int64_t) {
          calls::normalize_rows_backward(
              p_.options.backend, input_sums_[part].narrow(0, r0, n),
              p_.inputs[part].rows.narrow(0, r0, n), p_.norm,
              input_rows_[part].defined() ? input_rows_[part].narrow(0, r0, n) : Tensor(),
              sums_[kNormWeight], sums_[kNormBias]);
        });
      else if (!input_sums_[part].is_same(input_rows_[part]))
        input_rows_[part].copy_(input_sums_[part]);
    }
  }

  const Residuals& kept_;
  const Tensor lse_, dy_;
  WeightsGradient weights_gradient_;
  AttentionGradients masks_;
  std::array<Tensor, kParts> gradient_rows_;  // of the group
  bool dy_ready_ = true;
  int64_t dy_step_ = 1;
  std::array<Tensor, kParts> gradient_buffers_, weight_sums_;
  Tensor dout_buffer_, out_buffer_, w_out_sum_, delta_buffer_, correction_buffer_, dy_buffer_;
};

}  // namespace

MhaGradients::Gradients mha_bwd(
    const OptionalTensor& dy, const OptionalTensor& dweights, const MhaOperands& operands,
    const MhaOptions& options, const Tensor& seed, const Residuals& residuals,
    const OptionalTensor& lse, const std::array<bool, kMhaOperands>& wanted,
    const std::array<bool, kMhaOperands>& wide) {
  const BelowAutocast guard;
  const MhaProblem problem(operands, options, seed);
  const MhaSizes& sizes = problem.sizes;
  const MhaOperands& o = operands;
  std::vector<OptionalTensor> in_order = {
      o.query,     o.key,    o.value,  o.w_q,   o.w_k,    o.w_v,       o.b_q,
      o.b_k,       o.b_v,    o.w_out,  o.b_out, o.bias_k, o.bias_v,    o.norm_weight,
      o.norm_bias, o.q_norm, o.k_norm, o.cos,   o.sin,    o.attn_mask, o.key_mask};
  for (const AdapterFactors& adapter : o.adapters)
    in_order.insert(in_order.end(), {adapter.a, adapter.b});
  check_wanted(in_order, wanted);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !wanted[kCos] && !wanted[kSin], "multi_head_attention_bwd: cos and sin have no gradient");
  problem.check_results(dy, dweights, residuals, lse);
  const auto compute = operands.query.options().dtype(options.compute_dtype);
  const Tensor incoming =
      dy ? *dy : at::zeros({1, 1, 1}, compute).expand({sizes.batch, sizes.length_q, sizes.d_out});
  const Tensor row_lse = lse ? *lse
                             : at::empty(
                                   {sizes.batch, sizes.heads, sizes.length_q},
                                   compute.dtype(problem.precision.accumulate));
  return BackwardPass(problem, incoming, dweights, residuals, row_lse, wanted, wide).run();
}

}  // namespace fused_remat
