// The elementwise half of an MLP tile on CUDA: bias, rounding, dropout, activation and its
// gradient, bias-gradient sums. What is computed: csrc/mlp.h, csrc/mlp_element.h.
#pragma once

#include "dropout.h"
#include "platform.h"

namespace fused_remat::cuda {

// [rows, cols], last dim dense; `data` is null where the operand is absent.
struct MlpMatrix {
  void* data = nullptr;
  int64_t stride = 0;  // elements between rows
  int64_t cols = 0;
  bool aligned = false;  // rows start on 16 bytes; the launchers find out
};

// Pre-activations: the leading columns in `kept`, the others in `values` and, unless it is in them
// already, a bias on top, rounded to the dtype of `values`.
struct MlpPre {
  MlpMatrix values;            // null data: a plain layer's gate
  MlpMatrix kept;              // [rows, 0..features]
  const void* bias = nullptr;  // [features]
  Dtype bias_dtype = Dtype::kFloat;
};

struct MlpTileArgs {
  int64_t rows, features;
  int activation;  // place in FUSED_REMAT_ACTIVATIONS
  MlpPre up, gate;
  Dropout dropout;
  MlpMatrix hidden;  // written; may be any of the inputs, element for element
};

// hidden from pre-activations. `store_kept`: the kept columns are written, not read.
struct MlpActArgs {
  MlpTileArgs tile;
  bool store_kept;
};
void mlp_act(const MlpActArgs&, Dtype, Stream);

// Rows of one partial sum.
constexpr int64_t kMlpSumRows = 64;

// hidden, dup and dgate from pre-activations and dhidden. Outputs may be inputs, element for
// element.
struct MlpDactArgs {
  MlpTileArgs tile;
  MlpMatrix dhidden;
  MlpMatrix dup;
  MlpMatrix dgate;  // gated only
  // Sums of dup and dgate over blocks of rows, [ceil(rows / kMlpSumRows), features] of
  // Accumulate<dtype>, written; null = not wanted.
  void *partial_up, *partial_gate;
};
void mlp_dact(const MlpDactArgs&, Dtype, Stream);

}  // namespace fused_remat::cuda
