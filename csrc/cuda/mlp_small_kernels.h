// Launchers of the fused kernels of narrow MLPs. No torch header; what they compute:
// mlp_small_fwd.cu and mlp_small_bwd.cuh.
#pragma once

#include <cstdint>

#include "platform.h"

namespace fused_remat::cuda {

// A matrix of any strides (in elements), or a vector as one row. No data: absent.
struct SmallMatrix {
  void* data = nullptr;
  int64_t rows = 0, cols = 0;
  int64_t row_stride = 0, col_stride = 0;
  Dtype dtype = Dtype::kFloat;
  // Filled in by the launchers: whether whole rows are read 16 and written or read 4 bytes at a
  // time in the compute dtype.
  bool by_16_bytes = false, by_4_bytes = false;
};

struct SmallLayer {
  SmallMatrix w_up, w_gate;  // [F, D]; w_gate: gated layers
  SmallMatrix w_down;        // [Do, F]
  SmallMatrix b_up, b_gate;  // [1, F] or absent
  SmallMatrix b_down;        // [1, Do] or absent; forward only
};

struct SmallOptions {
  Dtype compute;                  // kHalf or kBFloat16
  int activation;                 // place in FUSED_REMAT_ACTIVATIONS
  const int64_t* seed = nullptr;  // on the device; null: no dropout
  uint64_t threshold = 0;         // philox::drop_threshold(p)
  float scale = 1.0f;             // of what is kept
};

struct SmallForward {
  SmallMatrix x;  // [M, D]
  SmallLayer layer;
  SmallOptions options;
  SmallMatrix y;  // [M, Do], compute dtype
};

// Gradients that are absent are not computed.
struct SmallBackward {
  SmallMatrix dy;  // [M, Do]
  SmallMatrix x;   // [M, D]
  SmallLayer layer;
  SmallOptions options;
  SmallMatrix dx;                       // like x, dense
  SmallMatrix dw_up, dw_gate, dw_down;  // like the weights
  SmallMatrix db_up, db_gate, db_down;  // vectors
  // mlp_small::plan_ranges, and where there is more than one range its partial sums and one zeroed
  // counter per slice.
  int64_t rows_per_range = 0, ranges = 1, slices = 0;
  float* partial = nullptr;
  uint32_t* arrived = nullptr;
};

void mlp_small_forward(SmallForward, Stream);
// By compute dtype.
void mlp_small_backward_half(const SmallBackward&, Stream);
void mlp_small_backward_bfloat16(const SmallBackward&, Stream);

}  // namespace fused_remat::cuda
