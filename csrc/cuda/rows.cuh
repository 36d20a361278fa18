// Rows of features in kernels: which threads share one, and pieces of one in registers.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "platform.h"
#include "vectors.cuh"
#include "warp.h"

namespace fused_remat::cuda::rows {

// Bytes of one access to a piece of `elements`.
constexpr int access_bytes(int elements, int element_bytes) {
  return elements * element_bytes < kVectorBytes ? elements * element_bytes : kVectorBytes;
}

constexpr int bytes_of(Dtype dtype) {
  return dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2;
}

// Whether pieces of `elements` that begin at multiples of that many may be accessed in vectors.
inline bool is_aligned(
    const void* data, Dtype dtype, int elements, std::initializer_list<int64_t> strides) {
  const int bytes = access_bytes(elements, bytes_of(dtype));
  bool aligned = reinterpret_cast<uintptr_t>(data) % bytes == 0;
  for (const int64_t stride : strides) aligned &= stride * bytes_of(dtype) % bytes == 0;
  return aligned;
}

template <class T, class A>
__device__ __forceinline__ T narrowed(A value) {
  if constexpr (sizeof(T) == 2)
    return T(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

template <class A, class T>
__device__ __forceinline__ A widened(T value) {
  if constexpr (sizeof(T) == 2)
    return static_cast<A>(static_cast<float>(value));
  else
    return static_cast<A>(value);
}

// f(T()) with the type that `dtype` names.
template <class F>
__device__ __forceinline__ void with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat:
      return f(float());
    case Dtype::kDouble:
      return f(double());
    case Dtype::kHalf:
      return f(c10::Half());
    case Dtype::kBFloat16:
      return f(c10::BFloat16());
  }
}

// The first `count` of N elements, zeros behind them.
template <class T, class A, int N>
__device__ __forceinline__ void load(
    A (&to)[N], const T* from, int64_t stride, int count, bool aligned) {
  if (aligned && count == N) {
    constexpr int kSize = access_bytes(N, sizeof(T)) / sizeof(T);
#pragma unroll
    for (int j = 0; j < N; j += kSize) {
      const Vector<T, kSize> values = load_vector<kSize>(from + j);
#pragma unroll
      for (int i = 0; i < kSize; ++i) to[j + i] = widened<A>(values.at[i]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = j < count ? widened<A>(from[j * stride]) : A(0);
  }
}

template <class T, class A, int N>
__device__ __forceinline__ void store(
    T* to, const A (&from)[N], int64_t stride, int count, bool aligned) {
  if (aligned && count == N) {
    constexpr int kSize = access_bytes(N, sizeof(T)) / sizeof(T);
#pragma unroll
    for (int j = 0; j < N; j += kSize) {
      Vector<T, kSize> values;
#pragma unroll
      for (int i = 0; i < kSize; ++i) values.at[i] = narrowed<T>(from[j + i]);
      store_vector(to + j, values);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < count) to[j * stride] = narrowed<T>(from[j]);
  }
}

// The same for dtypes that are known when the kernel runs.
template <class A, int N>
__device__ __forceinline__ void load(
    A (&to)[N], const void* from, Dtype dtype, int64_t offset, int64_t stride, int count,
    bool aligned) {
  with_type(dtype, [&](auto type) {
    load(to, static_cast<const decltype(type)*>(from) + offset, stride, count, aligned);
  });
}

template <class A, int N>
__device__ __forceinline__ void store(
    void* to, Dtype dtype, int64_t offset, const A (&from)[N], int64_t stride, int count,
    bool aligned) {
  with_type(dtype, [&](auto type) {
    store(static_cast<decltype(type)*>(to) + offset, from, stride, count, aligned);
  });
}

// Threads that share one row: a power of two up to a warp, or a whole block.
template <class A>
struct Lanes {
  int index, count;
  A* shared;  // [32], used by whole blocks

  __device__ Lanes(int lanes, A* scratch)
      : index(static_cast<int>(threadIdx.x) % lanes), count(lanes), shared(scratch) {}

  __device__ int group() const { return static_cast<int>(threadIdx.x) / count; }
  __device__ int groups() const { return static_cast<int>(blockDim.x) / count; }

  // Of all lanes, in a fixed order; all of them get it. Every thread of the block calls it.
  __device__ A sum(A value) const {
    if (count > kWarpSize) return block_sum(value, shared);
    for (int distance = count / 2; distance > 0; distance /= 2)
      value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
  }
};

// As many lanes as there are pieces, up to `most`: a power of two.
inline int lanes_for(int64_t pieces, int most) {
  int lanes = 1;
  while (lanes < pieces && lanes < most) lanes *= 2;
  return lanes;
}

}  // namespace fused_remat::cuda::rows
