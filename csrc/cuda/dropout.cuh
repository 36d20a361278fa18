// Dropout in kernels: the masks of philox.h, a few consecutive elements at a time.
#pragma once

#include "../philox.h"
#include "dropout.h"

namespace fused_remat::cuda {

// The words of kCount consecutive elements from linear index `first` on. One call of the generator
// serves four, so indices that are multiples of 4 take the fewest.
template <int kCount>
__device__ __forceinline__ void dropout_words(
    uint64_t seed, uint64_t first, uint32_t (&out)[kCount]) {
  constexpr int kCalls = (kCount + 2) / 4 + 1;
  const int lane = static_cast<int>(first & 3);
  uint32_t words[4 * kCalls] = {};
#pragma unroll
  for (int call = 0; call < kCalls; ++call) {
    if (4 * call >= lane + kCount) break;
    uint32_t made[4][1];
    philox::words<1>(seed, (first >> 2) + call, made);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[4 * call + i] = made[i][0];
  }
  // Chosen by comparisons: an index that is not known to the compiler would put words into memory.
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    out[i] = words[i];
#pragma unroll
    for (int l = 1; l < 4; ++l)
      if (lane == l && i + l < 4 * kCalls) out[i] = words[i + l];
  }
}

// 0 for a dropped element, 1 / (1 - p) for a kept one; 1 without dropout.
template <int kCount, class T>
__device__ __forceinline__ void dropout_scales(
    const Dropout& dropout, uint64_t seed, int64_t row, int64_t feature, T (&out)[kCount]) {
  if (dropout.seed == nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = T(1);
    return;
  }
  uint32_t words[kCount];
  dropout_words(
      seed,
      static_cast<uint64_t>(
          (dropout.row0 + row) * dropout.hidden_features + dropout.feature0 + feature),
      words);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    out[i] = words[i] >= dropout.threshold ? static_cast<T>(dropout.scale) : T(0);
}

}  // namespace fused_remat::cuda
