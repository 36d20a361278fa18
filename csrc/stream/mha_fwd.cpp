// Forward of multi-head attention, head group by head group: q, k and v of a group live in the
// workspace, and its share of y is added before the next group begins.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../attention_calls.h"
#include "heads.h"
#include "mha_pass.h"

namespace fused_remat {

using at::Tensor;

namespace {

class ForwardPass : MhaPass {
 public:
  explicit ForwardPass(const MhaProblem& problem) : MhaPass(problem) {
    const auto compute = problem.operands.query.options().dtype(p_.precision.compute);
    const auto wide = compute.dtype(p_.precision.accumulate);
    for (int part = 0; part < kParts; ++part)
      kept_[part] = keep(
          p_.options.keep[part], part, sizes_.part_heads(part), sizes_.part_width(part), compute);
    kept_[kResidualOut] =
        keep(p_.options.keep[kResidualOut], kQ, sizes_.heads, sizes_.value_width, compute);
    lse_ = at::empty({sizes_.batch, sizes_.heads, sizes_.length_q}, wide);
    y_ = p_.empty_rows(kQ, sizes_.d_out, compute);
    y_rows_ = p_.rows_of(y_, kQ);
    // With one group, or where y is as wide as a sum must be, it is its own sum.
    const bool one_group = p_.plan.kv_heads >= sizes_.kv_heads;
    y_sum_ = one_group || p_.precision.compute == p_.precision.accumulate
                 ? y_rows_
                 : at::empty(y_rows_.sizes(), wide);
    if (p_.options.need_weights != kNoWeights)
      weights_sum_ = at::zeros(
          {sizes_.batch, p_.options.need_weights == kAveragedWeights ? 1 : sizes_.heads,
           sizes_.length_q, sizes_.keys()},
          wide);
    if (!p_.options.keep[kResidualOut])
      out_buffer_ = take(
          true,
          sizes_.batch * sizes_.length_q * p_.plan.kv_heads * sizes_.repeats() * sizes_.value_width,
          p_.precision.compute);
  }

  MhaForward run() {
    add_bias();
    for_each_group([&](const MhaGroup& g) { run_group(g); });
    if (!y_sum_.is_same(y_rows_)) y_rows_.copy_(y_sum_);
    Tensor weights = at::empty({0}, y_.options());
    if (weights_sum_.defined()) {
      weights = weights_sum_.to(p_.precision.compute);
      if (p_.options.need_weights == kAveragedWeights) weights = weights.squeeze(1);
    }
    return {y_, weights, kept_, lse_};
  }

 private:
  Tensor keep(
      bool wanted, int part, int64_t heads, int64_t width, const at::TensorOptions& options) const {
    if (!wanted) return at::empty({0}, options);
    return p_.empty_rows(part, heads * width, options)
        .view({sizes_.batch, sizes_.part_length(part), heads, width});
  }

  void add_bias() {
    const OptionalTensor& bias = p_.operands.b_out;
    if (bias)
      y_sum_.copy_(bias->unsqueeze(0).expand_as(y_sum_));
    else
      y_sum_.zero_();
  }

  void run_group(const MhaGroup& g) {
    load_weights(g);
    make_heads(g, {}, &kept_);
    const Attending attending = group_of(p_.attending, g.head0, g.heads);
    const int64_t columns = g.heads * sizes_.value_width;
    // Kept, a group's out is a slice of columns; else it lives as long as the group.
    const Tensor out_rows = out_buffer_.defined()
                                ? matrix(out_buffer_, y_rows_.size(0), columns)
                                : p_.rows_of(kept_[kResidualOut].flatten(2), kQ)
                                      .narrow(1, g.head0 * sizes_.value_width, columns);
    const Tensor out = p_.heads_of(out_rows, kQ, sizes_.length_q, sizes_.value_width);
    const Tensor lse = lse_.narrow(1, g.head0, g.heads);
    calls::attention_fwd(
        p_.options.backend, heads_[kQ], heads_[kK], heads_[kV], attending, out, lse);
    if (weights_sum_.defined()) {
      const bool averaged = p_.options.need_weights == kAveragedWeights;
      calls::attention_weights(
          p_.options.backend, heads_[kQ], heads_[kK], attending, lse,
          averaged ? 1.0 / static_cast<double>(sizes_.heads) : 1.0,
          head_slice(weights_sum_, g.head0, g.heads));
    }
    for (int64_t r0 = 0; r0 < out_rows.size(0); r0 += p_.plan.rows) {
      const int64_t n = std::min(p_.plan.rows, out_rows.size(0) - r0);
      const Tensor factor = packed_factor(out_rows.narrow(0, r0, n));
      add_rounded(y_sum_.narrow(0, r0, n), factor, w_out_.t());
      if (out_adapter_) adapt_y(g, r0, factor);
    }
  }

  void adapt_y(const MhaGroup& g, int64_t r0, const Tensor& out) {
    const int64_t n = out.size(0);
    out_adapter_.reduce(out, r0, g.head0 * sizes_.value_width, product_buffer_);
    if (is_last(g))
      add_rounded(
          y_sum_.narrow(0, r0, n), packed_factor(out_adapter_.low(r0, n)), out_adapter_.b().t());
  }

  // sum += a b, also where the sum is narrower than the product (one group alone: one rounding).
  void add_rounded(const Tensor& sum, const Tensor& a, const Tensor& b) {
    if (sum.scalar_type() == a.scalar_type() || sum.scalar_type() == p_.precision.accumulate) {
      add_product(sum, a, b, /*first=*/false, product_buffer_);
      return;
    }
    Tensor product = matrix(product_buffer_, sum.size(0), sum.size(1));
    product.copy_(sum);
    add_product(product, a, b, /*first=*/false, product_buffer_);
    Tensor(sum).copy_(product);
  }

  std::array<Tensor, kMhaResiduals> kept_;
  Tensor lse_, y_, y_rows_, y_sum_, weights_sum_, out_buffer_;
};

}  // namespace

MhaForward mha_fwd(const MhaOperands& operands, const MhaOptions& options, const Tensor& seed) {
  const BelowAutocast guard;
  const MhaProblem problem(operands, options, seed);
  return ForwardPass(problem).run();
}

}  // namespace fused_remat
