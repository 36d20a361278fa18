#include "../head_transform.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "../stream/heads.h"

namespace fused_remat::aten {

using at::Tensor;

namespace {

// body(part, cos, sin) for slices along L, all heads of one batch at a time.
template <class Body>
void for_each_part(
    const Tensor& heads, const HeadTransform& transform, int64_t scratch, const Body& body) {
  constexpr int64_t kTemporaries = 6;
  const int64_t row =
      heads.size(1) * heads.size(3) * kTemporaries *
      static_cast<int64_t>(c10::elementSize(accumulation_dtype(heads.scalar_type())));
  const int64_t step = std::max<int64_t>(1, scratch / std::max<int64_t>(row, 1));
  const auto angles = [](const Tensor& t, int64_t b, int64_t l0, int64_t n) {
    return t.select(0, t.size(0) == 1 ? 0 : b).narrow(0, l0, n);
  };
  for (int64_t b = 0; b < heads.size(0); ++b)
    for (int64_t l0 = 0; l0 < heads.size(2); l0 += step) {
      const int64_t n = std::min(step, heads.size(2) - l0);
      const auto part = [b, l0, n](const Tensor& t) { return t.select(0, b).narrow(1, l0, n); };
      if (transform.cos)
        body(part, angles(*transform.cos, b, l0, n), angles(*transform.sin, b, l0, n));
      else
        body(part, Tensor(), Tensor());
    }
}

// Pairs (a, b) -> (-b, a); `back` -> (b, -a), the transpose.
Tensor turned(const Tensor& x, bool interleaved, bool back) {
  const int64_t half = x.size(-1) / 2;
  const auto member = [&](const Tensor& t, int64_t which) {
    return interleaved ? t.slice(-1, which, std::nullopt, 2) : t.narrow(-1, which * half, half);
  };
  Tensor out = at::empty_like(x, x.options(), at::MemoryFormat::Contiguous);
  member(out, back ? 1 : 0).copy_(member(x, back ? 0 : 1)).neg_();
  member(out, back ? 0 : 1).copy_(member(x, back ? 1 : 0));
  return out;
}

struct Scaled {
  Tensor values, by;
};
Scaled scaled(const Tensor& wide, double eps) {
  const Tensor by = at::rsqrt(wide.square().mean({-1}, /*keepdim=*/true) + eps);
  return {wide * by, by};
}

}  // namespace

void transform_heads(const Tensor& heads, const HeadTransform& transform, int64_t scratch) {
  const at::ScalarType accumulate = accumulation_dtype(heads.scalar_type()),
                       dtype = heads.scalar_type();
  for_each_part(
      heads, transform, scratch, [&](const auto& part, const Tensor& cos, const Tensor& sin) {
        Tensor to = part(heads), x = to.to(accumulate);
        // The norm's result is rounded before it is turned, as separate modules would.
        if (transform.norm_weight)
          x = (scaled(x, transform.eps).values * transform.norm_weight->to(accumulate))
                  .to(dtype)
                  .to(accumulate);
        if (cos.defined()) {
          const Tensor rotated = x.narrow(-1, 0, cos.size(-1));
          const Tensor result =
              rotated * cos.to(accumulate) +
              turned(rotated, transform.interleaved, /*back=*/false) * sin.to(accumulate);
          if (transform.norm_weight && cos.size(-1) < x.size(-1))
            to.narrow(-1, cos.size(-1), x.size(-1) - cos.size(-1))
                .copy_(x.narrow(-1, cos.size(-1), x.size(-1) - cos.size(-1)));
          to.narrow(-1, 0, cos.size(-1)).copy_(result);
        } else {
          to.copy_(x);
        }
      });
}

void transform_heads_backward(
    const Tensor& dheads, const Tensor& raw, const HeadTransform& transform, int64_t scratch,
    const Tensor& dnorm_weight) {
  const at::ScalarType accumulate = dheads.scalar_type();
  for_each_part(
      dheads, transform, scratch, [&](const auto& part, const Tensor& cos, const Tensor& sin) {
        Tensor d = part(dheads);
        if (cos.defined()) {
          Tensor rotated = d.narrow(-1, 0, cos.size(-1));
          const Tensor sines =
              turned(rotated * sin.to(accumulate), transform.interleaved, /*back=*/true);
          rotated.mul_(cos.to(accumulate)).add_(sines);
        }
        if (!transform.norm_weight) return;
        const auto [values, by] = scaled(part(raw).to(accumulate), transform.eps);
        if (dnorm_weight.defined()) Tensor(dnorm_weight).add_((d * values).sum({0, 1}));
        const Tensor g = d * transform.norm_weight->to(accumulate);
        d.copy_((g - values * (g * values).mean({-1}, /*keepdim=*/true)) * by);
      });
}

}  // namespace fused_remat::aten
