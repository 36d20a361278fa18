// What the attention passes share: checks, masks as implementers take them, and tensors of heads.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "../attention.h"

namespace fused_remat {

// Dtype of softmax, sums and gradients of tensors of that dtype.
at::ScalarType accumulation_dtype(at::ScalarType dtype);

// A [B, heads, length, width] tensor that lies in memory as [B, length, heads, width], so that
// what comes before or after it in a model is a view.
at::Tensor empty_heads(
    int64_t batch, int64_t heads, int64_t length, int64_t width, const at::TensorOptions& options);

// As `dtype`, with a dense last dim; itself where it is so already.
at::Tensor dense_heads(const at::Tensor& t, at::ScalarType dtype);

// `mask` in a dtype that every implementer reads beside `accumulate`; copies keep its own shape.
OptionalTensor readable_mask(const OptionalTensor& mask, at::ScalarType accumulate);
// key_mask [B, Lk] as [B, 1, 1, Lk].
OptionalTensor key_mask_view(const OptionalTensor& key_mask);

// The part of `t` [*, 1 or H, ...] that belongs to the heads [head0, head0 + heads).
at::Tensor head_slice(const at::Tensor& t, int64_t head0, int64_t heads);
OptionalTensor head_slice(const OptionalTensor& t, int64_t head0, int64_t heads);

// `attending` for a group of heads.
Attending group_of(const Attending& whole, int64_t head0, int64_t heads);

// Share of the workspace that implementers' tiles take; the rest holds the streamed operands.
int64_t tile_scratch(int64_t workspace);

// Zeroed gradient of a mask in the accumulation dtype, undefined where not wanted.
at::Tensor mask_gradient_sum(const OptionalTensor& mask, bool wanted, at::ScalarType accumulate);

}  // namespace fused_remat
