// Backward of multi-head attention, head group by head group: q, k and v of the group are projected
// again, exactly as forward did, then differentiated; gradients of its weights are final, those of
// the inputs are sums over groups. Fixed order, no atomics: the same bits every time.
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../mlp_calls.h"
#include "checks.h"
#include "heads.h"
#include "mha_pass.h"

namespace fused_remat {

using at::Tensor;

namespace {

using Gradients = std::array<Tensor, kMhaOperands>;
using Wanted = std::array<bool, kMhaOperands>;
using Residuals = std::array<OptionalTensor, kMhaResiduals>;

class BackwardPass : MhaPass {
 public:
  BackwardPass(
      const MhaProblem& problem, const Tensor& dy, const OptionalTensor& dweights,
      const Residuals& kept, const Tensor& lse, const Wanted& wanted, const Wanted& wide)
      : MhaPass(problem),
        wanted_(wanted),
        unrounded_(wide),
        kept_(kept),
        lse_(lse),
        dy_(p_.rows_of(dy, kQ)),
        wide_(problem.operands.query.options().dtype(p_.precision.accumulate)) {
    if (dweights) take_dweights(*dweights);
    for (int part = 0; part < kParts; ++part) part_wanted_[part] = is_part_wanted(part);
    masks_.dattn_mask =
        mask_gradient_sum(p_.attending.attn_mask, wanted_[kAttnMask], p_.precision.accumulate);
    masks_.dkey_mask =
        mask_gradient_sum(p_.attending.key_mask, wanted_[kKeyMask], p_.precision.accumulate);
    make_gradients();
    take_buffers();
  }

  Gradients run() {
    for_each_group([&](const MhaGroup& g) { run_group(g); });
    finish_inputs();
    for (const MhaOperand bias : {kBout, kBiasK, kBiasV, kNormWeight, kNormBias, kQNorm, kKNorm})
      if (wanted_[bias]) gradients_[bias] = sums_[bias].to(dtype_of(bias));
    for (int part = 0; part < kParts; ++part)
      if (bias_sums_[part].defined()) bias_gradients_[part].copy_(bias_sums_[part]);
    if (wanted_[kAttnMask])
      gradients_[kAttnMask] = masks_.dattn_mask.to(p_.operands.attn_mask->scalar_type());
    if (wanted_[kKeyMask])
      gradients_[kKeyMask] = masks_.dkey_mask.view({sizes_.batch, sizes_.length_k})
                                 .to(p_.operands.key_mask->scalar_type());
    return gradients_;
  }

 private:
  // Whether any gradient flows through q, k or v.
  bool is_part_wanted(int part) const {
    const bool packed_weight = !p_.operands.w_k,
               packed_bias = p_.projections[part].bias && p_.operands.b_q &&
                             p_.operands.b_q->size(0) != p_.projections[kQ].weight.size(0);
    const int input = p_.projections[part].input;
    bool wanted = wanted_[kQuery + input] || wanted_[packed_weight ? kWq : kWq + part] ||
                  (p_.projections[part].bias && wanted_[packed_bias ? kBq : kBq + part]);
    if (p_.inputs[input].normalized) wanted = wanted || wanted_[kNormWeight] || wanted_[kNormBias];
    if (part == kQ) return wanted || wanted_[kQNorm];
    if (part == kK) return wanted || wanted_[kKNorm] || wanted_[kBiasK];
    return wanted || wanted_[kBiasV];
  }

  void take_dweights(const Tensor& dweights) {
    Tensor d = dweights.to(p_.precision.accumulate);
    if (d.stride(-1) != 1) d = d.contiguous();
    const bool averaged = d.dim() == 3;
    weights_gradient_.dweights = averaged ? d.unsqueeze(1) : d;
    weights_gradient_.factor = averaged ? 1.0 / static_cast<double>(sizes_.heads) : 1.0;
  }

  at::ScalarType dtype_of(MhaOperand which) const {
    if (unrounded_[which]) return p_.precision.accumulate;
    const MhaOperands& o = p_.operands;
    switch (which) {
      case kBout:
        return o.b_out->scalar_type();
      case kBiasK:
        return o.bias_k->scalar_type();
      case kBiasV:
        return o.bias_v->scalar_type();
      case kNormWeight:
        return o.norm_weight->scalar_type();
      case kNormBias:
        return o.norm_bias->scalar_type();
      case kQNorm:
        return o.q_norm->scalar_type();
      default:
        return o.k_norm->scalar_type();
    }
  }

  Tensor empty_gradient(int operand, const Tensor& of) const {
    const auto dtype = unrounded_[operand] ? p_.precision.accumulate : of.scalar_type();
    return at::empty(of.sizes(), of.options().dtype(dtype));
  }

  void make_gradients() {
    const MhaOperands& o = p_.operands;
    const OptionalTensor weights[] = {o.w_q, o.w_k, o.w_v}, biases[] = {o.b_q, o.b_k, o.b_v};
    const OptionalTensor inputs[] = {o.query, o.key, o.value};
    int64_t first = 0;
    for (int part = 0; part < kParts; ++part) {
      const int64_t rows = sizes_.part_columns(part);
      for (const bool is_bias : {false, true}) {
        const OptionalTensor* own = is_bias ? biases : weights;
        const int base = is_bias ? kBq : kWq;
        const bool packed =
            is_bias ? (own[0] && own[0]->size(0) != sizes_.part_columns(kQ)) : !o.w_k;
        const int operand = packed ? base : base + part;
        if (!wanted_[operand] || !own[packed ? 0 : part]) continue;
        if (!gradients_[operand].defined())
          gradients_[operand] = empty_gradient(operand, *own[packed ? 0 : part]);
        (is_bias ? bias_gradients_ : weight_gradients_)[part] =
            packed ? gradients_[operand].narrow(0, first, rows) : gradients_[operand];
        if (is_bias) bias_sums_[part] = at::zeros({rows}, wide_);
      }
      first += rows;
      make_input_gradient(part, inputs[part]);
    }
    if (wanted_[kWout]) gradients_[kWout] = empty_gradient(kWout, o.w_out);
    const OptionalTensor vectors[] = {o.b_out,     o.bias_k, o.bias_v, o.norm_weight,
                                      o.norm_bias, o.q_norm, o.k_norm};
    const MhaOperand names[] = {kBout, kBiasK, kBiasV, kNormWeight, kNormBias, kQNorm, kKNorm};
    for (size_t i = 0; i < std::size(names); ++i)
      if (wanted_[names[i]]) sums_[names[i]] = at::zeros(vectors[i]->sizes(), wide_);
  }

  // The sum over groups lives in the gradient itself where that is as wide as a sum must be.
  void make_input_gradient(int part, const OptionalTensor& input) {
    const bool through_norm = part == kQ && p_.norm && (wanted_[kNormWeight] || wanted_[kNormBias]);
    if (!input || !(wanted_[kQuery + part] || through_norm)) return;
    const int64_t columns = input->size(2);
    if (wanted_[kQuery + part]) {
      gradients_[kQuery + part] = p_.empty_rows(part, columns, input->options());
      input_rows_[part] = p_.rows_of(gradients_[kQuery + part], part);
    }
    const bool direct =
        input_rows_[part].defined() && input_rows_[part].scalar_type() == p_.precision.accumulate;
    input_sums_[part] = direct
                            ? input_rows_[part]
                            : at::empty({sizes_.batch * sizes_.part_length(part), columns}, wide_);
    input_sums_[part].zero_();
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
          take(sums_weights, most_columns(part) * p_.projections[part].weight.size(1), wide);
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
      store_product(dout_rows.narrow(0, r0, dy.size(0)), dy, w_out_);
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

  // to <- a b, rounded once.
  void store_product(const Tensor& to, const Tensor& a, const Tensor& b) {
    const bool direct = to.scalar_type() == a.scalar_type();
    Tensor product = direct ? to : matrix(factor_buffer_, to.size(0), to.size(1));
    add_product(product, a, b, /*first=*/true, {});
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
          weights, to);
  }

  void out_projection(const MhaGroup& g, const Tensor& out_rows) {
    if (wanted_[kBout] && g.kv0 == 0)
      for_each_dy([&](int64_t, const Tensor& dy) {
        calls::column_sums(p_.options.backend, dy, sums_[kBout]);
      });
    if (!wanted_[kWout]) return;
    const Tensor to = gradients_[kWout].narrow(1, g.head0 * sizes_.value_width, out_rows.size(1));
    const Tensor sum = weight_sum(to, w_out_sum_);
    for_each_dy([&](int64_t r0, const Tensor& dy) {
      const Tensor out = packed_factor(out_rows.narrow(0, r0, dy.size(0)));
      add_product(sum, dy.t(), out, /*first=*/r0 == 0, product_buffer_);
    });
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
      for (const int part : parts) {
        const Tensor d = gradient_rows_[part].narrow(0, part == kQ ? r0 : with_extra, n);
        if (bias_sums_[part].defined())
          calls::column_sums(p_.options.backend, d, group_rows(g, part, bias_sums_[part]));
        const Tensor factor = packed_factor(d);
        if (sums[part].defined()) {
          if (!x.defined()) x = input_chunk(input, r0, n);
          add_product(sums[part], factor.t(), x, /*first=*/r0 == 0, product_buffer_);
        }
        if (input_sums_[input].defined())
          add_product(
              input_sums_[input].narrow(0, r0, n), factor, weights_[part], /*first=*/false,
              product_buffer_);
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

  const Wanted &wanted_, &unrounded_;
  const Residuals& kept_;
  const Tensor lse_, dy_;
  const at::TensorOptions wide_;
  WeightsGradient weights_gradient_;
  std::array<bool, kParts> part_wanted_{};
  AttentionGradients masks_;
  Gradients gradients_;
  std::array<Tensor, kMhaOperands> sums_;  // of what is a vector per call
  std::array<Tensor, kParts> weight_gradients_, bias_gradients_, bias_sums_;
  std::array<Tensor, kParts> input_rows_, input_sums_;
  std::array<Tensor, kParts> gradient_rows_;  // of the group
  bool dy_ready_ = true;
  int64_t dy_step_ = 1;
  std::array<Tensor, kParts> gradient_buffers_, weight_sums_;
  Tensor dout_buffer_, out_buffer_, w_out_sum_, delta_buffer_, correction_buffer_, dy_buffer_;
};

}  // namespace

Gradients mha_bwd(
    const OptionalTensor& dy, const OptionalTensor& dweights, const MhaOperands& operands,
    const MhaOptions& options, const Tensor& seed, const Residuals& residuals,
    const OptionalTensor& lse, const Wanted& wanted, const Wanted& wide) {
  const BelowAutocast guard;
  const MhaProblem problem(operands, options, seed);
  const MhaSizes& sizes = problem.sizes;
  const MhaOperands& o = operands;
  check_wanted(
      {o.query,     o.key,    o.value,  o.w_q,   o.w_k,    o.w_v,       o.b_q,
       o.b_k,       o.b_v,    o.w_out,  o.b_out, o.bias_k, o.bias_v,    o.norm_weight,
       o.norm_bias, o.q_norm, o.k_norm, o.cos,   o.sin,    o.attn_mask, o.key_mask},
      wanted);
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
