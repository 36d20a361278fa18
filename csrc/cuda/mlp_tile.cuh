// What the kernels of an MLP tile share: a thread has kSize consecutive features of some rows.
#pragma once

#include "dropout.cuh"
#include "mlp_kernels.h"
#include "vectors.cuh"

namespace fused_remat::cuda {

// Threads of a block: kLanes across the features, kRowThreads across the rows.
constexpr int kMlpLanes = 32, kMlpRowThreads = 8;

template <class T>
constexpr int64_t kMlpTileFeatures = kMlpLanes * kVectorSize<T>;

// The block's tile of kMlpSumRows rows, and the thread's features in it.
template <class T>
struct MlpPlace {
  int64_t row_block, row, row_end;
  int64_t feature0;  // of the tile
  int64_t feature;   // of the thread
  int n;             // features of the thread; 0 past the end

  __device__ __forceinline__ MlpPlace(const MlpTileArgs& tile, int64_t task) {
    const int64_t across = (tile.features + kMlpTileFeatures<T> - 1) / kMlpTileFeatures<T>;
    row_block = task / across;
    const int64_t first = row_block * kMlpSumRows;
    row = first + threadIdx.y;
    row_end = first + kMlpSumRows < tile.rows ? first + kMlpSumRows : tile.rows;
    feature0 = task % across * kMlpTileFeatures<T>;
    feature = feature0 + threadIdx.x * kVectorSize<T>;
    const int64_t left = tile.features - feature;
    n = left <= 0 ? 0 : left < kVectorSize<T> ? static_cast<int>(left) : kVectorSize<T>;
  }
};

inline int64_t mlp_tasks(const MlpTileArgs& tile, int64_t tile_features) {
  return (tile.rows + kMlpSumRows - 1) / kMlpSumRows *
         ((tile.features + tile_features - 1) / tile_features);
}

inline void find_alignment(MlpMatrix& matrix, size_t element_bytes) {
  matrix.aligned = rows_aligned(matrix.data, matrix.stride, element_bytes);
}

template <class T, class V, int kSize>
__device__ __forceinline__ void load_row(
    const MlpMatrix& from, int64_t row, int64_t feature, int n, V (&to)[kSize]) {
  const T* data = static_cast<const T*>(from.data) + row * from.stride + feature;
  if (from.aligned && n == kSize) {
    const Vector<T, kSize> values = load_vector<kSize>(data);
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = static_cast<V>(values.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = i < n ? static_cast<V>(data[i]) : V(0);
  }
}

template <class T, class V, int kSize>
__device__ __forceinline__ void store_row(
    const MlpMatrix& to, int64_t row, int64_t feature, int n, const V (&values)[kSize]) {
  T* data = static_cast<T*>(to.data) + row * to.stride + feature;
  if (to.aligned && n == kSize) {
    Vector<T, kSize> rounded;
#pragma unroll
    for (int i = 0; i < kSize; ++i) rounded.at[i] = static_cast<T>(values[i]);
    store_vector(data, rounded);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (i < n) data[i] = static_cast<T>(values[i]);
  }
}

// Read anew for each row: biases that no GEMM took are few, registers are fewer.
template <class V, int kSize>
__device__ __forceinline__ void add_bias(
    const MlpPre& pre, int64_t feature, int n, V (&to)[kSize]) {
  const auto add = [&](auto zero) {
    using B = decltype(zero);
    const B* bias = static_cast<const B*>(pre.bias) + feature;
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (i < n) to[i] += static_cast<V>(static_cast<Accumulate<B>>(bias[i]));
  };
  switch (pre.bias_dtype) {
    case Dtype::kFloat:
      return add(float{});
    case Dtype::kDouble:
      return add(double{});
    case Dtype::kHalf:
      return add(c10::Half{});
    case Dtype::kBFloat16:
      return add(c10::BFloat16{});
  }
}

__device__ __forceinline__ int kept_features(const MlpMatrix& kept, int64_t feature, int n) {
  const int64_t left = kept.cols - feature;
  return left <= 0 ? 0 : left < n ? static_cast<int>(left) : n;
}

// A residual and what is rebuilt must be the same number, so both are rounded.
template <class T, class V, int kSize>
__device__ __forceinline__ void load_pre(
    const MlpPre& pre, bool read_kept, int64_t row, int64_t feature, int n, V (&to)[kSize]) {
  const int n_kept = read_kept ? kept_features(pre.kept, feature, n) : 0;
  if (n_kept == n) return load_row<T>(pre.kept, row, feature, n, to);
  load_row<T>(pre.values, row, feature, n, to);
  if (pre.bias != nullptr) {
    add_bias(pre, feature, n, to);
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = static_cast<V>(static_cast<T>(to[i]));
  }
  if (n_kept == 0) return;
  V kept[kSize];
  load_row<T>(pre.kept, row, feature, n_kept, kept);
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    if (i < n_kept) to[i] = kept[i];
}

}  // namespace fused_remat::cuda
