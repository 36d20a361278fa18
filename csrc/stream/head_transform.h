// What happens to q and k between projection and scores: an RMSNorm of each head, then a rotation.
// docs/math.md, section "Rotary embedding and norms of q and k".
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fused_remat {

struct HeadTransform {
  std::optional<at::Tensor> norm_weight;  // [E]
  double eps = 0.0;
  std::optional<at::Tensor> cos, sin;  // [1 or B, L, R], R <= E
  bool interleaved = false;

  bool needs_raw() const { return norm_weight.has_value(); }
  explicit operator bool() const { return norm_weight.has_value() || cos.has_value(); }
};

// heads [B, H, L, E], in place; computed in the accumulation dtype, rounded to that of `heads`.
// Some batches and lengths at a time, so that temporaries stay within `scratch` bytes.
void transform_heads(const at::Tensor& heads, const HeadTransform&, int64_t scratch);

// dheads [B, H, L, E] in the accumulation dtype, from the gradient of what transform_heads made to
// that of its input `raw` (read only where a norm needs it), in place; the sum for norm_weight is
// added to `dnorm_weight` where defined.
void transform_heads_backward(
    const at::Tensor& dheads, const at::Tensor& raw, const HeadTransform&, int64_t scratch,
    const at::Tensor& dnorm_weight);

}  // namespace fused_remat
