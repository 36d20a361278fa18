// The MLP ops of all levels, with their arguments grouped. Schemas and registration: library.cpp.
// Maths: docs/math.md.
//
// Dims: M token rows, D input width, Do output width, F hidden width. Weights as nn.Linear stores
// them, [out, in]. plain: hidden = act(up);  gated: hidden = act(gate) * up;  then dropout on
// hidden;  y = hidden w_down^T + b_down.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "norm.h"

namespace fused_remat {

using OptionalTensor = std::optional<at::Tensor>;

// Adds scale b a to a weight [out, in] (Hu et al., "LoRA", 2021). The factors may have a dtype of
// their own; products take them in the GEMM dtype.
struct LowRank {
  OptionalTensor a;  // [r, in]; absent = no adapter
  OptionalTensor b;  // [out, r]
  double scale = 1.0;

  explicit operator bool() const { return a.has_value(); }
  int64_t rank() const { return a ? a->size(0) : 0; }
};

struct MlpLayer {
  at::Tensor w_up;        // [F, D]
  at::Tensor w_down;      // [Do, F]
  OptionalTensor b_up;    // [F]
  OptionalTensor b_down;  // [Do]
  OptionalTensor w_gate;  // [F, D]; present = gated
  OptionalTensor b_gate;  // [F]
  LowRank up_adapter;
  LowRank gate_adapter;
  LowRank down_adapter;

  bool gated() const { return w_gate.has_value(); }
};

struct MlpOptions {
  std::string activation;  // a name of activations.h
  double dropout_p;        // in [0, 1); 0 in evaluation
  int64_t workspace;       // bytes of scratch that a pass may use
  std::string backend;     // suffix of the level-3 ops
  // What pre-activations and y are rounded to: autocast's choice, else the dtype of x.
  at::ScalarType compute_dtype;
  Norm norm;  // of x, before both projections
};

// Leading hidden features whose pre-activations are kept for backward, 0..F each.
struct MlpKeep {
  int64_t up;
  int64_t gate;
};

// Gradients, in the order of every list and mask.
enum MlpGradient {
  kDx,
  kDwUp,
  kDwDown,
  kDbUp,
  kDbDown,
  kDwGate,
  kDbGate,
  kDNormWeight,
  kDNormBias,
  kDUpA,
  kDUpB,
  kDGateA,
  kDGateB,
  kDDownA,
  kDDownB,
  kMlpGradients
};
using MlpGradients = std::array<at::Tensor, kMlpGradients>;
using MlpGradientMask = std::array<bool, kMlpGradients>;

// What forward returns; `up` [M, keep.up] and `gate` [M, keep.gate] are the residuals. All in
// compute_dtype.
struct MlpForward {
  at::Tensor y;  // [..., Do]
  at::Tensor up;
  at::Tensor gate;
};

// Level 2. `seed` is int64 [1], or [0] without dropout.
MlpForward mlp_fwd(
    const at::Tensor& x, const MlpLayer&, const at::Tensor& seed, const MlpOptions&,
    const MlpKeep&);
// What `up` and `gate` [M, 0..F] lack of F columns is rebuilt (with 0 columns their rows do not
// matter). dy [..., Do], any strides. A gradient that `wanted` does not ask for is a 0-element
// tensor; one of a parameter in `wide` has the dtype of the sums, unrounded.
MlpGradients mlp_bwd(
    const at::Tensor& dy, const at::Tensor& x, const MlpLayer&, const at::Tensor& up,
    const at::Tensor& gate, const at::Tensor& seed, const MlpOptions&,
    const MlpGradientMask& wanted, const MlpGradientMask& wide);

// Level 3 works on one [rows, features] tile, cut out of the whole [M, hidden_features] at (row0,
// feature0).
struct MlpTile {
  at::Tensor seed;
  std::string activation;
  double dropout_p;
  int64_t row0;
  int64_t feature0;
  int64_t hidden_features;
};
// Buffers [rows, features] in the GEMM dtype; what is not needed is a 0-element tensor. `scratch`
// of the cuda backward is flat memory (backward_scratch in stream/plan.h), and may be missing.
struct MlpBuffers {
  at::Tensor hidden;
  at::Tensor dup;
  at::Tensor dgate;
  at::Tensor scratch;
};
// Residuals of the tile, [rows, 0..features] in compute_dtype.
struct MlpResiduals {
  at::Tensor up;
  at::Tensor gate;
};

// x [rows, D] and the weights of the tile's features -> buffers.hidden, residuals (written). Gated:
// overwrites buffers.scratch.
using MlpForwardChunk = void(
    const at::Tensor& x, const MlpLayer&, const MlpTile&, const MlpResiduals&, const MlpBuffers&);
// x [rows, D], dy [rows, Do], residuals (read) -> buffers.hidden, dup, dgate; db_up and db_gate
// [features] are added to (fp32, or fp64 for fp64; 0-element = not wanted).
using MlpBackwardChunk = void(
    const at::Tensor& x, const at::Tensor& dy, const MlpLayer&, const MlpTile&, const MlpResiduals&,
    const MlpBuffers&, const at::Tensor& db_up, const at::Tensor& db_gate);
// out [N] += sum over the rows of a [rows, N], in row order.
using ColumnSums = void(const at::Tensor& a, const at::Tensor& out);

namespace aten {
MlpForwardChunk mlp_fwd_chunk;
MlpBackwardChunk mlp_bwd_chunk;
ColumnSums column_sums;
}  // namespace aten
namespace cpu {
MlpForwardChunk mlp_fwd_chunk;
MlpBackwardChunk mlp_bwd_chunk;
ColumnSums column_sums;
}  // namespace cpu

}  // namespace fused_remat
