// What the attention ops refuse, for callers who skip the Python functions and their messages: no
// argument may make a kernel read or write out of bounds.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../attention_ops.h"
#include "../mha_ops.h"

namespace fused_remat {

void check_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& attn_mask,
    const OptionalTensor& key_mask, const AttentionOptions&, const at::Tensor& seed);

void check_mha(const MhaOperands&, const MhaOptions&, const at::Tensor& seed);

// Raises ValueError unless `t` is absent or of that shape.
void check_shape(const char* name, const OptionalTensor& t, at::IntArrayRef shape);

// Raises ValueError unless `wanted` has one entry per operand and asks for present ones only.
void check_wanted(const std::vector<OptionalTensor>& operands, at::ArrayRef<bool> wanted);

}  // namespace fused_remat
