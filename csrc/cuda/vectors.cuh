// Accesses of 16 bytes at once, where addresses allow, and two halves in a word.
#pragma once

#include "platform.h"

namespace fused_remat::cuda {

constexpr int kVectorBytes = 16;

template <class T>
constexpr int kVectorSize = kVectorBytes / sizeof(T);

template <class T, int kSize = kVectorSize<T>>
struct alignas(sizeof(T) * kSize) Vector {
  T at[kSize];
};

// One access of the whole vector; `from` and `to` are aligned to its size.
template <int kSize, class T>
__device__ __forceinline__ Vector<T, kSize> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, kSize>*>(from);
}
template <int kSize, class T>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, kSize>& values) {
  *reinterpret_cast<Vector<T, kSize>*>(to) = values;
}

// Two values of T, c10::Half or c10::BFloat16, as fragments and words of memory hold them: low
// first.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  return static_cast<uint32_t>(T(low).x) | static_cast<uint32_t>(T(high).x) << 16;
}

// Whether rows that begin at `data` and lie `row_stride` elements apart all begin on 16 bytes.
inline bool rows_aligned(const void* data, int64_t row_stride, size_t element_bytes) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 &&
         row_stride * static_cast<int64_t>(element_bytes) % kVectorBytes == 0;
}

}  // namespace fused_remat::cuda
