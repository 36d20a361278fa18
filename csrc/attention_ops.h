// The level-2 ops of attention: whole calls, on any device. Schemas: library_attention.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "attention.h"

namespace fused_remat {

struct AttentionOptions {
  int64_t causal, window_left, window_right;
  double dropout_p, scale, softcap;
  int64_t workspace;
  std::string backend;
  at::ScalarType compute_dtype;
};

// attn_mask 4-D, key_mask [B, Lk]; seed int64 [1], or [0] without dropout. Returns out and lse.
std::tuple<at::Tensor, at::Tensor> attention_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& attn_mask,
    const OptionalTensor& key_mask, const AttentionOptions&, const at::Tensor& seed);

// Gradients of q, k, v, attn_mask and key_mask; a 0-element tensor where the mask does not ask.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_bwd(
    const OptionalTensor& dout, const OptionalTensor& dlse, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const OptionalTensor& attn_mask,
    const OptionalTensor& key_mask, const AttentionOptions&, const at::Tensor& seed,
    const OptionalTensor& out, const OptionalTensor& lse, at::ArrayRef<bool> output_mask);

}  // namespace fused_remat
