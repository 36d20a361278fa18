// Host side of the launchers of narrow MLPs: what a matrix allows, and which kernel runs.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "mlp_small.h"
#include "mlp_small_kernels.h"

namespace fused_remat::cuda::small {

// Fills in how the matrix may be read and written.
inline void describe(SmallMatrix& m, Dtype compute) {
  const auto address = reinterpret_cast<uintptr_t>(m.data);
  const bool dense = m.data != nullptr && m.dtype == compute && (m.col_stride == 1 || m.cols == 1);
  m.by_16_bytes = dense && address % 16 == 0 && m.row_stride % 8 == 0 && m.cols % 8 == 0;
  m.by_4_bytes = dense && address % 4 == 0 && m.row_stride % 2 == 0;
}
inline void describe(SmallLayer& layer, Dtype compute) {
  describe(layer.w_up, compute);
  describe(layer.w_gate, compute);
  describe(layer.w_down, compute);
}

template <class T, int kWidth, bool kGate>
struct Variant {
  using Type = T;
  static constexpr int kBucket = kWidth;
  static constexpr bool kGated = kGate;
};

template <class T, bool kGate, class F>
void with_bucket(int64_t bucket, const F& f) {
  if (bucket == 32)
    f(Variant<T, 32, kGate>{});
  else if (bucket == 64)
    f(Variant<T, 64, kGate>{});
  else
    f(Variant<T, 128, kGate>{});
}
template <class T, class F>
void with_variant(int64_t bucket, bool gated, const F& f) {
  gated ? with_bucket<T, true>(bucket, f) : with_bucket<T, false>(bucket, f);
}

}  // namespace fused_remat::cuda::small
