// Level 1 of every op that rebuilds activations, once for all of them, on the dispatcher's stack.
//
// An op X is described by its schemas alone (library*.cpp):
//   X(tensors and settings ...) -> outputs
//   X_fwd(the same ..., Tensor seed) -> outputs and residuals
//   X_bwd(Tensor? gradient per output ..., the arguments of X ..., Tensor seed,
//         Tensor? per result of X_fwd ..., bool[] output_mask[, bool[] wide_mask=[]])
//         -> gradient per tensor argument; those of wide_mask in fp32 where the argument is half
//         precision, unrounded (parameters only: entries of inputs and masks are not read)
//   X_reference(the arguments of X ..., Tensor seed) -> outputs, in differentiable torch
// Settings known by name: dropout_p (a seed is drawn where it is not 0), keep_* (nothing is kept
// where no gradient can be asked for), compute_dtype (autocast's choice, else the first tensor's).
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/stack.h>

#include <array>
#include <vector>

namespace fused_remat {

// Results lie in memory as inputs do, so a compiler must not lay inputs out anew.
inline const std::vector<at::Tag> kExactStrides{at::Tag::needs_exact_strides};

// Which results of X_fwd backward reads; the others are not saved.
void describe_remat_op(const char* name, std::vector<bool> saved_results);

// A mask among the arguments of X_bwd; an optional one may be empty.
template <size_t kOperands>
std::array<bool, kOperands> read_mask(
    const char* name, const c10::List<bool>& mask, bool optional = false) {
  std::array<bool, kOperands> flags{};
  if (optional && mask.empty()) return flags;
  TORCH_CHECK_VALUE(
      mask.size() == kOperands, name, " must have ", kOperands, " entries, got ", mask.size());
  for (size_t i = 0; i < kOperands; ++i) flags[i] = mask.get(i);
  return flags;
}

void remat_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void remat_without_grad(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// Casts nothing: x and the fp32 parameters are what is kept, and pieces are cast inside. fp64 stays
// out of autocast, as everywhere in torch.
void remat_autocast_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void remat_autocast_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fused_remat
