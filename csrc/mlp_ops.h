// The level-3 ops of the MLP as the dispatcher calls them, for every library that implements them.
// Schemas: library.cpp.
#pragma once

#include "mlp.h"

namespace fused_remat {

template <MlpForwardChunk kImplementation>
void mlp_fwd_chunk_op(
    const at::Tensor& x, const at::Tensor& w_up, const OptionalTensor& b_up,
    const OptionalTensor& w_gate, const OptionalTensor& b_gate, const at::Tensor& seed,
    std::string activation, double dropout_p, int64_t row0, int64_t feature0,
    int64_t hidden_features, const at::Tensor& up, const at::Tensor& gate, const at::Tensor& hidden,
    const at::Tensor& scratch) {
  kImplementation(
      x, {w_up, {}, b_up, std::nullopt, w_gate, b_gate},
      {seed, activation, dropout_p, row0, feature0, hidden_features}, {up, gate},
      {hidden, {}, {}, scratch});
}

template <MlpBackwardChunk kImplementation>
void mlp_bwd_chunk_op(
    const at::Tensor& x, const at::Tensor& dy, const at::Tensor& w_up, const at::Tensor& w_down,
    const OptionalTensor& b_up, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    const at::Tensor& up, const at::Tensor& gate, const at::Tensor& seed, std::string activation,
    double dropout_p, int64_t row0, int64_t feature0, int64_t hidden_features,
    const at::Tensor& hidden, const at::Tensor& dup, const at::Tensor& dgate,
    const at::Tensor& scratch, const at::Tensor& db_up, const at::Tensor& db_gate) {
  kImplementation(
      x, dy, {w_up, w_down, b_up, std::nullopt, w_gate, b_gate},
      {seed, activation, dropout_p, row0, feature0, hidden_features}, {up, gate},
      {hidden, dup, dgate, scratch}, db_up, db_gate);
}

}  // namespace fused_remat
