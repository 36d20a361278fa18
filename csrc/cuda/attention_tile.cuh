// Tiles of attention: their shapes, how they come from memory, and the products of a warp.
//
// A warp owns 16 rows of every tile that its block owns. Its scores and sums are fragments as
// mma_m16n8k16 lays out d, for every dtype: at[n][i] of lane l is row l / 4 + 8 (i / 2), column
// 8 n + 2 (l % 4) + i % 2. Halves are multiplied by tensor cores, float and double by FMA.
#pragma once

#include <algorithm>

#include "attention_kernels.h"
#include "vectors.cuh"
#include "warp.h"

namespace fused_remat::cuda {

// How many rows a block owns, and how many it visits at a time: what 99 KiB of shared memory and
// 255 registers hold. A kernel that keeps more than one tile of scores takes fewer columns.
template <class T, int kHeadWidth, int kMostColumns = 64>
struct AttentionShape {
  static constexpr int kWidth = kHeadWidth;
  static constexpr bool kTensorCores = sizeof(T) == 2;
  static constexpr int kRowBytes = kWidth * sizeof(T);
  // 16 bytes more than a row: the rows that a warp reads at once lie in different banks.
  static constexpr int kStride = kWidth + kVectorSize<T>;
  static constexpr int kWarps = kRowBytes <= 512 ? 4 : 2;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kColumns = std::min(
      kMostColumns, kTensorCores ? (kRowBytes <= 256 ? 64 : 32)
                                 : (kRowBytes <= 256   ? 32
                                    : kRowBytes <= 512 ? 16
                                                       : 8));
  // 0: ptxas chooses between registers and blocks at a time; it would spill wider numbers.
  static constexpr int kMinBlocks = kTensorCores ? 0 : 1;
  static constexpr int kTiles = kColumns / 8;  // fragments of a warp's scores
  static constexpr int kSums = kWidth / 8;     // fragments of a warp's sums
  // What a warp hands its scores over in: tensor cores take them from registers.
  static constexpr int kStagedStride = kColumns + kVectorSize<T>;
  static constexpr int kStaged = kTensorCores ? 0 : 16 * kStagedStride;
  // Dynamic shared memory for so many owned and visited tiles, beside `kStatic` bytes: no more than
  // a block gets on any GPU since compute capability 8.0.
  template <int kOwned, int kVisited, size_t kStatic = 0>
  static constexpr size_t shared_bytes() {
    constexpr size_t kBytes =
        ((kOwned * kRows + kVisited * kColumns) * kStride + kWarps * kStaged) * sizeof(T);
    static_assert(kBytes + kStatic <= 99 * 1024);
    return kBytes;
  }
};

// This thread's place in its block.
struct Thread {
  int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  int row = 16 * warp + lane / 4;  // of its first fragment element in what the block owns
  int column = 2 * (lane % 4);
};

template <class T>
__device__ __forceinline__ const T* rows_of(
    const AttentionHeads<const void>& x, int64_t batch, int64_t head) {
  return static_cast<const T*>(x.data) + batch * x.batch + head * x.head;
}

// The first columns of kRows rows to shared memory: rows from row0, zeros beyond `length` and
// `width`. Starts copies that the caller commits and waits for.
template <class Shape, int kRows, class T>
__device__ __forceinline__ void load_tile(
    T* shared, const AttentionHeads<const void>& x, int64_t batch, int64_t head, int row0,
    int length, int width) {
  constexpr int kSize = kVectorSize<T>, kRowVectors = Shape::kWidth / kSize;
  const T* const from = rows_of<T>(x, batch, head);
  const int filled = (width + 15) / 16 * 16;  // products take 16 columns at a time
  for (int at = threadIdx.x; at < kRows * kRowVectors; at += Shape::kThreads) {
    const int row = at / kRowVectors, column = at % kRowVectors * kSize;
    if (column >= filled) continue;
    T* const to = shared + row * Shape::kStride + column;
    const bool inside = row0 + row < length && column < width;
    const T* const source = inside ? from + (row0 + row) * x.row + column : from;
    if (x.vectors) {
      cp_async_16(to, source, inside);
      continue;
    }
    Vector<T> values;
    for (int i = 0; i < kSize; ++i)
      values.at[i] = inside && column + i < width ? source[i] : T(0.0f);
    store_vector<kSize>(to, values);
  }
}

template <class A, int kTiles>
__device__ __forceinline__ void clear(A (&fragments)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) fragments[n][i] = A(0);
}

// Rounded once, whatever the compiler contracts.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}

// scores = a b^T over `width` columns: 16 rows of a, 8 kTiles rows of b, in shared memory.
template <class Shape, class T, class A, int kTiles>
__device__ __forceinline__ void multiply_rows(
    A (&scores)[kTiles][4], const T* a, const T* b, int width) {
  clear(scores);
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kStride = Shape::kStride;
  if constexpr (Shape::kTensorCores) {
    a += lane % 16 * kStride + lane / 16 * 8;
    b += (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < Shape::kWidth; k += 16) {
      if (k >= width) break;
      uint32_t left[4], right[4];
      ldmatrix_x4(left, a + k);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        ldmatrix_x4(right, b + n * 8 * kStride + k);
        mma_m16n8k16<T>(scores[n], left, {right[0], right[1]});
        mma_m16n8k16<T>(scores[n + 1], left, {right[2], right[3]});
      }
    }
  } else {
    constexpr int kSize = kVectorSize<T>;
    a += lane / 4 * kStride;
    b += lane % 4 * 2 * kStride;
#pragma unroll 1
    for (int k = 0; k < width; k += kSize) {
      const Vector<T> left[2] = {
          load_vector<kSize>(a + k), load_vector<kSize>(a + 8 * kStride + k)};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const T* const from = b + n * 8 * kStride + k;
        const Vector<T> right[2] = {load_vector<kSize>(from), load_vector<kSize>(from + kStride)};
#pragma unroll
        for (int e = 0; e < kSize; ++e)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            scores[n][i] = multiply_add(left[i / 2].at[e], right[i % 2].at[e], scores[n][i]);
      }
    }
  }
}

// sums += scores b over the first `width` columns of b, 8 kTiles rows in shared memory. `staged`
// is the warp's own, see AttentionShape.
template <class Shape, class T, class A, int kTiles>
__device__ __forceinline__ void multiply_scores(
    A (&sums)[Shape::kSums][4], const A (&scores)[kTiles][4], const T* b, int width, T* staged) {
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kStride = Shape::kStride;
  if constexpr (Shape::kTensorCores) {
    b += lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kTiles; k += 2) {
      const uint32_t left[4] = {
          pack<T>(scores[k][0], scores[k][1]), pack<T>(scores[k][2], scores[k][3]),
          pack<T>(scores[k + 1][0], scores[k + 1][1]), pack<T>(scores[k + 1][2], scores[k + 1][3])};
#pragma unroll
      for (int n = 0; n < Shape::kSums; n += 2) {
        if (n * 8 >= width) break;
        uint32_t right[4];
        ldmatrix_x4_trans(right, b + k * 8 * kStride + n * 8);
        mma_m16n8k16<T>(sums[n], left, {right[0], right[1]});
        mma_m16n8k16<T>(sums[n + 1], left, {right[2], right[3]});
      }
    }
  } else {
    constexpr int kSize = kVectorSize<T>;
    T* const mine = staged + lane / 4 * Shape::kStagedStride;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        mine[i / 2 * 8 * Shape::kStagedStride + n * 8 + lane % 4 * 2 + i % 2] = scores[n][i];
    __syncwarp();
    b += lane % 4 * 2;
#pragma unroll 1
    for (int k = 0; k < 8 * kTiles; k += kSize) {
      const Vector<T> left[2] = {
          load_vector<kSize>(mine + k), load_vector<kSize>(mine + 8 * Shape::kStagedStride + k)};
#pragma unroll
      for (int e = 0; e < kSize; ++e)
#pragma unroll
        for (int n = 0; n < Shape::kSums; ++n) {
          if (n * 8 >= width) break;
          const Vector<T, 2> right = load_vector<2>(b + (k + e) * kStride + n * 8);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sums[n][i] = multiply_add(left[i / 2].at[e], right.at[i % 2], sums[n][i]);
        }
    }
  }
}

// A warp's fragments times `factor[0]` (first rows) and `factor[1]` to rows from row0 + 8 r.
template <class To, class A, int kTiles>
__device__ __forceinline__ void store_fragments(
    const AttentionHeads<void>& x, int64_t batch, int64_t head, int row, int column, int length,
    int width, const A (&fragments)[kTiles][4], const A (&factor)[2]) {
  To* const to = static_cast<To*>(x.data) + batch * x.batch + head * x.head;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= length) continue;
    To* const line = to + (row + 8 * half) * x.row + column;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const Vector<To, 2> pair = {
          static_cast<To>(fragments[n][2 * half] * factor[half]),
          static_cast<To>(fragments[n][2 * half + 1] * factor[half])};
      if (x.vectors && column + 8 * n < width) {
        store_vector<2>(line + 8 * n, pair);
      } else {
        if (column + 8 * n < width) line[8 * n] = pair.at[0];
        if (column + 8 * n + 1 < width) line[8 * n + 1] = pair.at[1];
      }
    }
  }
}

// The sum, the largest over the four lanes that share a row.
template <class A>
__device__ __forceinline__ A row_sum(A value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}
template <class A>
__device__ __forceinline__ A row_max(A value) {
  for (int distance = 1; distance <= 2; distance *= 2) {
    const A other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// f(T{}, width) with the narrowest width of kernels, as a constant, that holds heads that wide.
template <class F>
void with_attention_shape(Dtype dtype, int width, F&& f) {
  if (width > attention_max_width(dtype))
    throw std::runtime_error(
        "fused_remat: heads of width " + std::to_string(width) +
        " are wider than the attention kernels in CUDA C++ take");
  with_dtype(dtype, [&](auto zero) {
    if (width <= 64) return f(zero, std::integral_constant<int, 64>{});
    if (width <= 128) return f(zero, std::integral_constant<int, 128>{});
    if constexpr (sizeof(zero) < 8) f(zero, std::integral_constant<int, 256>{});
  });
}

// f(T{}, width, plain) for the call: 16-bit types have kernels of their own, without masks and the
// like, for calls that are `plain`.
template <class F>
void with_attention_variant(Dtype dtype, const AttentionCall& call, bool plain, F&& f) {
  const int width = std::max(call.width, call.value_width);
  with_attention_shape(dtype, width, [&](auto zero, auto head_width) {
    if constexpr (sizeof(zero) == 2)
      if (plain) return f(zero, head_width, std::true_type{});
    f(zero, head_width, std::false_type{});
  });
}

inline dim3 attention_grid(const char* name, int64_t blocks) {
  if (blocks > kMaxBlocks)
    throw std::runtime_error(std::string("fused_remat: ") + name + ": more than 2^31 blocks");
  return dim3(static_cast<unsigned>(blocks));
}

inline int64_t tiles_of(int64_t length, int tile) { return (length + tile - 1) / tile; }

}  // namespace fused_remat::cuda
