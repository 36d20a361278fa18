// Level 3 of attention composed from ATen: any device and dtype, a block of query rows at a time,
// never absent.
#include "../attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "activations.h"

namespace fused_remat::aten {

using at::Tensor;

namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// Rows of the scores of all (batch, head), in the accumulation dtype. Key-value heads are never
// repeated: the query heads that share one are folded into its rows.
class Rows {
 public:
  Rows(const Tensor& q, const Tensor& k, const Attending& attending, at::ScalarType accumulate)
      : q_(q), k_(k.to(accumulate)), attending_(attending), accumulate_(accumulate) {
    const int64_t temporaries = attending.softcap > 0.0 ? 7 : 6;
    const int64_t bytes = q.size(0) * q.size(1) * k.size(2) *
                          static_cast<int64_t>(c10::elementSize(accumulate)) * temporaries;
    block_ = std::clamp<int64_t>(
        attending.scratch / std::max<int64_t>(bytes, 1), 1, std::max<int64_t>(q.size(2), 1));
  }

  template <class Body>
  void for_each_block(const Body& body) const {
    if (q_.size(0) == 0 || q_.size(1) == 0) return;
    for (int64_t i0 = 0; i0 < q_.size(2); i0 += block_) body(i0, std::min(block_, q_.size(2) - i0));
  }

  Tensor wide(const Tensor& t, int64_t i0, int64_t rows) const {
    return t.narrow(2, i0, rows).to(accumulate_);
  }
  const Tensor& keys() const { return k_; }

  // `slope`, where asked for and scores are capped: their derivative by what they were before.
  Tensor scores(int64_t i0, int64_t rows, Tensor* slope = nullptr) const {
    Tensor s = times_transposed(wide(q_, i0, rows), k_).mul_(attending_.scale);
    if (attending_.softcap > 0.0) {
      s.div_(attending_.softcap).tanh_();
      if (slope != nullptr) *slope = at::square(s).neg_().add_(1.0);
      s.mul_(attending_.softcap);
    }
    const int64_t masked = k_.size(2) - attending_.extra_keys;
    Tensor maskable = s.narrow(3, 0, masked);
    mask_band(maskable, i0, rows);
    for (const OptionalTensor& mask : {attending_.attn_mask, attending_.key_mask}) {
      if (!mask) continue;
      const Tensor part = mask->size(2) == 1 ? *mask : mask->narrow(2, i0, rows);
      if (part.scalar_type() == at::kBool)
        maskable.masked_fill_(part.logical_not(), kNothing);
      else
        maskable.add_(part);
    }
    return s;
  }

  // Before dropout; 0 in rows with nothing to attend to. Whole rows are at hand, so that they are
  // normalised again rather than by the known lse, which has too few digits where scores are large.
  Tensor probabilities(int64_t i0, int64_t rows, Tensor* slope = nullptr) const {
    const Tensor s = scores(i0, rows, slope);
    const Tensor nothing = s.eq(kNothing).all(3, /*keepdim=*/true);
    return at::softmax(s.masked_fill(nothing, 0.0), 3).masked_fill_(nothing, 0.0);
  }

  // What dropout multiplies the probabilities with; undefined without dropout.
  Tensor dropout(int64_t i0, int64_t rows) const {
    if (attending_.dropout_p == 0.0) return {};
    const int64_t keys = k_.size(2);
    std::vector<Tensor> scales;
    for (int64_t b = 0; b < q_.size(0); ++b)
      for (int64_t h = 0; h < q_.size(1); ++h)
        scales.push_back(dropout_scales(
            attending_.seed, attending_.dropout_p,
            (b * attending_.num_heads + attending_.head0 + h) * q_.size(2) + i0, rows, 0, keys,
            keys, k_.options()));
    return at::cat(scales).view({q_.size(0), q_.size(1), rows, keys});
  }

  // a [B, H, rows, n] b[B, Hk, m, n]^T -> [B, H, rows, m]
  Tensor times_transposed(const Tensor& a, const Tensor& b) const {
    return at::matmul(folded(a), b.transpose(2, 3))
        .view({a.size(0), a.size(1), a.size(2), b.size(2)});
  }
  // a [B, H, rows, n] b[B, Hk, n, m] -> [B, H, rows, m]
  Tensor times(const Tensor& a, const Tensor& b) const {
    return at::matmul(folded(a), b).view({a.size(0), a.size(1), a.size(2), b.size(3)});
  }
  // a [B, H, rows, n]^T b [B, H, rows, m] -> [B, Hk, n, m], summed over the heads that share one.
  Tensor transposed_times(const Tensor& a, const Tensor& b) const {
    return at::matmul(folded(a).transpose(2, 3), folded(b));
  }

 private:
  Tensor folded(const Tensor& a) const {
    const int64_t kv = k_.size(1);
    return a.reshape({a.size(0), kv, a.size(1) / kv * a.size(2), a.size(3)});
  }

  void mask_band(Tensor& scores, int64_t i0, int64_t rows) const {
    const Band& band = attending_.band;
    if (band.low <= -Band::kUnlimited && band.high >= Band::kUnlimited) return;
    const auto integers = at::TensorOptions().dtype(at::kLong).device(scores.device());
    const Tensor distance =
        at::arange(scores.size(3), integers) - at::arange(i0, i0 + rows, integers).unsqueeze(1);
    scores.masked_fill_(distance.lt(band.low).logical_or_(distance.gt(band.high)), kNothing);
  }

  const Tensor q_, k_;
  const Attending& attending_;
  const at::ScalarType accumulate_;
  int64_t block_;
};

Tensor dropped(const Tensor& values, const Tensor& scales) {
  return scales.defined() ? values * scales : values;
}

// The part of the weights' gradient that reaches the probabilities after dropout.
Tensor weights_part(const WeightsGradient& weights, int64_t i0, int64_t rows) {
  return weights.dweights->narrow(2, i0, rows) * weights.factor;
}

void add_mask_gradient(const Tensor& dmask, const Tensor& dscores, int64_t i0, int64_t rows) {
  if (!dmask.defined()) return;
  const Tensor part = dmask.size(2) == 1 ? dmask : dmask.narrow(2, i0, rows);
  Tensor sums = part;
  // Where masked keys are none, or the mask has one column for all of them, sum_to_size sums those.
  sums.add_(dscores.sum_to_size(part.sizes()));
}

}  // namespace

void attention_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& out, const Tensor& lse) {
  const Rows tiles(q, k, attending, lse.scalar_type());
  const Tensor values = v.to(lse.scalar_type());
  tiles.for_each_block([&](int64_t i0, int64_t rows) {
    const Tensor scores = tiles.scores(i0, rows);
    // Rows with nothing to attend to would be NaN: their scores count as zeros, their results as
    // zeros.
    const Tensor nothing = scores.eq(kNothing).all(3, /*keepdim=*/true);
    const Tensor some = scores.masked_fill(nothing, 0.0);
    const Tensor p = at::softmax(some, 3).masked_fill_(nothing, 0.0);
    out.narrow(2, i0, rows).copy_(tiles.times(dropped(p, tiles.dropout(i0, rows)), values));
    lse.narrow(2, i0, rows)
        .copy_(
            at::logsumexp(some, {3}, /*keepdim=*/true).masked_fill_(nothing, kNothing).squeeze(3));
  });
}

void attention_delta(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& lse, const Tensor& dout, const WeightsGradient& weights, bool rebuild,
    const Tensor& out, const Tensor& delta, const Tensor& correction) {
  correction.zero_();
  const Rows tiles(q, k, attending, lse.scalar_type());
  const Tensor values = rebuild ? v.to(lse.scalar_type()) : v;
  tiles.for_each_block([&](int64_t i0, int64_t rows) {
    Tensor p;
    if (rebuild || weights.dweights)
      p = dropped(tiles.probabilities(i0, rows), tiles.dropout(i0, rows));
    if (rebuild) out.narrow(2, i0, rows).copy_(tiles.times(p, values));
    Tensor row_delta = (tiles.wide(out, i0, rows) * tiles.wide(dout, i0, rows)).sum(3);
    if (weights.dweights) row_delta = row_delta + (p * weights_part(weights, i0, rows)).sum(3);
    delta.narrow(2, i0, rows).copy_(row_delta);
  });
}

void attention_bwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& lse, const Tensor&, const Tensor& delta, const Tensor& dout,
    const OptionalTensor&, const WeightsGradient& weights, const AttentionGradients& gradients) {
  const Rows tiles(q, k, attending, lse.scalar_type());
  const Tensor values = v.to(lse.scalar_type());
  const int64_t masked = k.size(2) - attending.extra_keys;
  tiles.for_each_block([&](int64_t i0, int64_t rows) {
    Tensor slope;
    const Tensor p = tiles.probabilities(i0, rows, &slope), scales = tiles.dropout(i0, rows);
    const Tensor dout_rows = tiles.wide(dout, i0, rows);
    Tensor dv = gradients.dv, dk = gradients.dk, dq = gradients.dq;
    if (dv.defined()) dv.add_(tiles.transposed_times(dropped(p, scales), dout_rows));
    Tensor dp = tiles.times_transposed(dout_rows, values);
    if (weights.dweights) dp = dp + weights_part(weights, i0, rows);
    const Tensor row_delta = delta.narrow(2, i0, rows).unsqueeze(3);
    Tensor dscores = (dropped(dp, scales) - row_delta).mul_(p);
    for (const Tensor& dmask : {gradients.dattn_mask, gradients.dkey_mask})
      add_mask_gradient(dmask, dscores.narrow(3, 0, masked), i0, rows);
    if (slope.defined()) dscores.mul_(slope);
    if (dq.defined())
      dq.narrow(2, i0, rows).add_(tiles.times(dscores, tiles.keys()), attending.scale);
    if (dk.defined())
      dk.add_(tiles.transposed_times(dscores, tiles.wide(q, i0, rows)), attending.scale);
  });
}

void attention_weights(
    const Tensor& q, const Tensor& k, const Attending& attending, const Tensor& lse, double factor,
    const Tensor& weights) {
  const Rows tiles(q, k, attending, lse.scalar_type());
  tiles.for_each_block([&](int64_t i0, int64_t rows) {
    Tensor p = dropped(tiles.probabilities(i0, rows), tiles.dropout(i0, rows));
    if (weights.size(1) == 1) p = p.sum(1, /*keepdim=*/true);
    weights.narrow(2, i0, rows).add_(p, factor);
  });
}

}  // namespace fused_remat::aten
