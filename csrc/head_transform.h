// What happens to q and k between projection and scores: an RMSNorm of each head, then a rotation.
// docs/math.md, section "Rotary embedding and norms of q and k".
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace fused_remat {

struct HeadTransform {
  std::optional<at::Tensor> norm_weight;  // [E]
  double eps = 0.0;
  std::optional<at::Tensor> cos, sin;  // [1 or B, L, R], R <= E
  bool interleaved = false;

  bool needs_raw() const { return norm_weight.has_value(); }
  explicit operator bool() const { return norm_weight.has_value() || cos.has_value(); }
};

// Level 3. heads [B, H, L, E], in place; computed in the accumulation dtype, rounded to that of
// `heads`. Some batches and lengths at a time, so that temporaries stay within `scratch` bytes.
using TransformHeads = void(const at::Tensor& heads, const HeadTransform&, int64_t scratch);

// Level 3. dheads [B, H, L, E] in the accumulation dtype, from the gradient of what transform_heads
// made to that of its input `raw` (read only where a norm needs it), in place; the sum for
// norm_weight is added to `dnorm_weight` where defined.
using TransformHeadsBackward = void(
    const at::Tensor& dheads, const at::Tensor& raw, const HeadTransform&, int64_t scratch,
    const at::Tensor& dnorm_weight);

namespace aten {
TransformHeads transform_heads;
TransformHeadsBackward transform_heads_backward;
}  // namespace aten
// Through the dispatcher, by the backend's name.
namespace calls {
void transform_heads(
    const std::string& backend, const at::Tensor& heads, const HeadTransform&, int64_t scratch);
void transform_heads_backward(
    const std::string& backend, const at::Tensor& dheads, const at::Tensor& raw,
    const HeadTransform&, int64_t scratch, const at::Tensor& dnorm_weight);
}  // namespace calls

}  // namespace fused_remat
