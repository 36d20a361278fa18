#include "heads.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace fused_remat {

using at::Tensor;

at::ScalarType accumulation_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor empty_heads(
    int64_t batch, int64_t heads, int64_t length, int64_t width, const at::TensorOptions& options) {
  return at::empty({batch, length, heads, width}, options).transpose(1, 2);
}

Tensor dense_heads(const Tensor& t, at::ScalarType dtype) {
  const Tensor cast = t.to(dtype);
  return cast.stride(3) == 1 || cast.size(3) <= 1 ? cast : cast.contiguous();
}

OptionalTensor readable_mask(const OptionalTensor& mask, at::ScalarType accumulate) {
  if (!mask || mask->scalar_type() == at::kBool || mask->scalar_type() == accumulate) return mask;
  const bool half = mask->scalar_type() == at::kBFloat16 || mask->scalar_type() == at::kHalf;
  return half && accumulate == at::kFloat ? *mask : mask->to(accumulate);
}

OptionalTensor key_mask_view(const OptionalTensor& key_mask) {
  if (!key_mask) return std::nullopt;
  return key_mask->unsqueeze(1).unsqueeze(1);
}

Tensor head_slice(const Tensor& t, int64_t head0, int64_t heads) {
  return t.size(1) == 1 ? t : t.narrow(1, head0, heads);
}
OptionalTensor head_slice(const OptionalTensor& t, int64_t head0, int64_t heads) {
  return t ? OptionalTensor(head_slice(*t, head0, heads)) : std::nullopt;
}

Attending group_of(const Attending& whole, int64_t head0, int64_t heads) {
  Attending group = whole;
  group.head0 = head0;
  group.attn_mask = head_slice(whole.attn_mask, head0, heads);
  return group;
}

int64_t tile_scratch(int64_t workspace) { return workspace / 8; }

Tensor mask_gradient_sum(const OptionalTensor& mask, bool wanted, at::ScalarType accumulate) {
  if (!wanted) return {};
  return at::zeros(mask->sizes(), mask->options().dtype(accumulate));
}

}  // namespace fused_remat
