// A tile's place in the dropout mask, as kernels take it.
#pragma once

#include <cstdint>

namespace fused_remat::cuda {

struct Dropout {
  const int64_t* seed = nullptr;  // on the device; null = no dropout
  uint64_t threshold = 0;         // philox::drop_threshold(p)
  double scale = 1.0;             // 1 / (1 - p)
  // The tile is cut out of [M, hidden_features] at (row0, feature0).
  int64_t row0 = 0, feature0 = 0, hidden_features = 0;
};

}  // namespace fused_remat::cuda
