// What the forward and backward kernels of narrow MLPs share: loads and stores of matrices of any
// strides, fragments of m16n8k16 products, and the elementwise part.
//
// A bucket W covers D and Do; everything past the real sizes is zero in shared memory and in
// fragments. Shared rows are 16 bytes longer than their contents, so that the 8 rows that an
// ldmatrix reads lie in different banks.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#include "../mlp_element.h"
#include "../philox.h"
#include "activation_switch.cuh"
#include "mlp_small.h"
#include "mlp_small_kernels.h"
#include "platform.h"
#include "vectors.cuh"
#include "warp.h"

namespace fused_remat::cuda::small {

constexpr int kPad = 8;  // elements at the end of a shared row

template <class T>
struct DtypeOf;
template <>
struct DtypeOf<c10::Half> {
  static constexpr Dtype value = Dtype::kHalf;
};
template <>
struct DtypeOf<c10::BFloat16> {
  static constexpr Dtype value = Dtype::kBFloat16;
};

__device__ __forceinline__ float load(const SmallMatrix& m, int64_t row, int64_t col) {
  const int64_t at = row * m.row_stride + col * m.col_stride;
  if (m.dtype == Dtype::kFloat) return static_cast<const float*>(m.data)[at];
  if (m.dtype == Dtype::kHalf) return static_cast<const c10::Half*>(m.data)[at];
  return static_cast<const c10::BFloat16*>(m.data)[at];
}
// 0 past the end.
__device__ __forceinline__ float load_or_zero(const SmallMatrix& m, int64_t row, int64_t col) {
  return row < m.rows && col < m.cols ? load(m, row, col) : 0.0f;
}
__device__ __forceinline__ void store(const SmallMatrix& m, int64_t row, int64_t col, float value) {
  if (row >= m.rows || col >= m.cols) return;
  const int64_t at = row * m.row_stride + col * m.col_stride;
  if (m.dtype == Dtype::kFloat)
    static_cast<float*>(m.data)[at] = value;
  else if (m.dtype == Dtype::kHalf)
    static_cast<c10::Half*>(m.data)[at] = c10::Half(value);
  else
    static_cast<c10::BFloat16*>(m.data)[at] = c10::BFloat16(value);
}

// Columns col and col + 1, col even.
template <class T>
__device__ __forceinline__ uint32_t load_pair(const SmallMatrix& m, int64_t row, int64_t col) {
  if (row >= m.rows || col >= m.cols) return 0;
  if (m.by_4_bytes && col + 1 < m.cols)
    return *reinterpret_cast<const uint32_t*>(
        static_cast<const T*>(m.data) + row * m.row_stride + col);
  return pack<T>(load(m, row, col), load_or_zero(m, row, col + 1));
}
template <class T>
__device__ __forceinline__ void store_pair(
    const SmallMatrix& m, int64_t row, int64_t col, float low, float high) {
  if (row < m.rows && m.by_4_bytes && col + 1 < m.cols) {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(m.data) + row * m.row_stride + col) =
        pack<T>(low, high);
  } else {
    store(m, row, col, low);
    store(m, row, col + 1, high);
  }
}

// shared[rows][cols + kPad] <- m from (row0, col0), zeros past its end; by the whole block, done
// after cp_async_wait and __syncthreads. `cols` and `col0` are multiples of 8.
template <class T>
__device__ __forceinline__ void stage(
    T* shared, const SmallMatrix& m, int64_t row0, int64_t col0, int rows, int cols) {
  const int stride = cols + kPad;
  if (m.by_16_bytes) {
    const int pieces = cols / 8;
    for (int i = threadIdx.x; i < rows * pieces; i += blockDim.x) {
      const int r = i / pieces, c = i % pieces * 8;
      const bool inside = row0 + r < m.rows && col0 + c < m.cols;
      const T* from = static_cast<const T*>(m.data);
      if (inside) from += (row0 + r) * m.row_stride + col0 + c;
      cp_async_16(shared + r * stride + c, from, inside);
    }
    return;
  }
  // Neighbouring threads read neighbours in memory.
  const bool by_columns = m.row_stride < m.col_stride;
  for (int i = threadIdx.x; i < rows * cols; i += blockDim.x) {
    const int r = by_columns ? i % rows : i / cols, c = by_columns ? i / rows : i % cols;
    shared[r * stride + c] = T(load_or_zero(m, row0 + r, col0 + c));
  }
}

__device__ __forceinline__ float load_bias(const SmallMatrix& b, int64_t feature) {
  return b.data == nullptr ? 0.0f : load_or_zero(b, 0, feature);
}
// bias[features] <- b from feature0, zeros where it is absent or ends.
__device__ __forceinline__ void stage_bias(
    float* shared, const SmallMatrix& b, int64_t feature0, int features) {
  for (int i = threadIdx.x; i < features; i += blockDim.x) shared[i] = load_bias(b, feature0 + i);
}

__device__ __forceinline__ int lane_of() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_of() { return threadIdx.x / 32; }

// Addresses that a lane hands to ldmatrix_x4 for a 16 x 16 block at `corner`. `Wide` holds two
// B fragments (columns n 0..7 and 8..15) stored as [n][k], or as [k][n] and read transposed; `Tall`
// is an A fragment stored as [m][k], or as [k][m] and read transposed.
template <class T>
__device__ __forceinline__ const T* wide(const T* corner, int stride) {
  const int lane = lane_of();
  return corner + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
}
template <class T>
__device__ __forceinline__ const T* wide_trans(const T* corner, int stride) {
  const int lane = lane_of();
  return corner + lane % 16 * stride + lane / 16 * 8;
}
template <class T>
__device__ __forceinline__ const T* tall(const T* corner, int stride) {
  return wide_trans(corner, stride);
}
template <class T>
__device__ __forceinline__ const T* tall_trans(const T* corner, int stride) {
  return wide(corner, stride);
}

// Two fragments of results, 16 x 16: value [j][i] is at row lane / 4 + i / 2 * 8, column j * 8 +
// lane % 4 * 2 + i % 2.
using Pair = float[2][4];
using A = uint32_t[4];

template <class T>
__device__ __forceinline__ void multiply(Pair& c, const A& a, const uint32_t (&b)[4]) {
  const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
  mma_m16n8k16<T>(c[0], a, left);
  mma_m16n8k16<T>(c[1], a, right);
}

// Results are, rounded, the A operand of the next product over their columns.
template <class T>
__device__ __forceinline__ void as_operand(A& a, const Pair& c) {
  for (int j = 0; j < 2; ++j) {
    a[2 * j] = pack<T>(c[j][0], c[j][1]);
    a[2 * j + 1] = pack<T>(c[j][2], c[j][3]);
  }
}

__device__ __forceinline__ void clear(Pair& c) {
  for (int j = 0; j < 2; ++j)
    for (int i = 0; i < 4; ++i) c[j][i] = 0.0f;
}

// Rows [row0, row0 + 16) of m as A fragments, straight from memory.
template <class T, int kSteps>
__device__ __forceinline__ void load_rows(A (&a)[kSteps], const SmallMatrix& m, int64_t row0) {
  const int lane = lane_of();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    for (int i = 0; i < 4; ++i)
      a[k][i] = load_pair<T>(m, row0 + lane / 4 + i % 2 * 8, k * 16 + lane % 4 * 2 + i / 2 * 8);
}

// c = a w^T for 16 rows of w, [n][k] from `w`; or w is stored [k][n].
template <class T, int kSteps>
__device__ __forceinline__ void times_rows(Pair& c, const A (&a)[kSteps], const T* w, int stride) {
  clear(c);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t b[4];
    ldmatrix_x4(b, wide(w + k * 16, stride));
    multiply<T>(c, a[k], b);
  }
}
template <class T, int kSteps>
__device__ __forceinline__ void times_columns(
    Pair& c, const A (&a)[kSteps], const T* w, int stride) {
  clear(c);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, wide_trans(w + k * 16 * stride, stride));
    multiply<T>(c, a[k], b);
  }
}

// The dropout of one call; linear index = row * F + feature.
class DropScales {
 public:
  __device__ __forceinline__ DropScales(const SmallOptions& options, int64_t features)
      : on_(options.seed != nullptr),
        seed_(on_ ? static_cast<uint64_t>(*options.seed) : 0),
        threshold_(options.threshold),
        scale_(options.scale),
        features_(features) {}

  __device__ __forceinline__ bool on() const { return on_; }
  // The scale of an element: 0 where it is dropped. Neighbours share a draw of four words.
  __device__ __forceinline__ float operator()(int64_t row, int64_t feature) {
    const auto index = static_cast<uint64_t>(row * features_ + feature);
    if (index >> 2 != drawn_) {
      drawn_ = index >> 2;
      philox::words<1>(seed_, drawn_, words_);
    }
    // Not indexed by the lane: that would put the words into local memory.
    const uint32_t low = index & 1 ? words_[1][0] : words_[0][0];
    const uint32_t high = index & 1 ? words_[3][0] : words_[2][0];
    return (index & 2 ? high : low) < threshold_ ? 0.0f : scale_;
  }

 private:
  const bool on_;
  const uint64_t seed_, threshold_;
  const float scale_;
  const int64_t features_;
  uint64_t drawn_ = ~uint64_t(0);  // no index reaches it
  uint32_t words_[4][1];
};

}  // namespace fused_remat::cuda::small
