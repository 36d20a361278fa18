// CUDA C++ as a host compiler may read it: the names that kernels of csrc/cuda use, run by the
// scheduler.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "scheduler.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block runs at a time, so what its threads share may be static; thread_local puts all of it in
// one place that the scheduler can fill (static_shared.h).
#define __shared__ static thread_local

using cudaStream_t = struct SimtStream*;

inline void __syncthreads(simt::Where where = simt::Where::current()) { simt::barrier(where); }

inline void __syncwarp(unsigned mask = 0xffffffffu, simt::Where where = simt::Where::current()) {
  char nothing;
  simt::collective("__syncwarp", mask, false, &nothing, [](void* const(&)[32], uint32_t) {}, where);
}

inline void __threadfence() {}

namespace simt {

// Where `source` is a lane outside the mask, CUDA leaves the result undefined; here that is an
// error.
template <class T>
T shuffle(const char* what, unsigned mask, T value, int source, Where where) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  struct Operand {
    T value;
    int source;
    T result;
  } operand{value, source, {}};
  collective(
      what, mask, false, &operand,
      [](void* const(&operands)[kLanes], uint32_t mask) {
        for (int lane = 0; lane < kLanes; ++lane) {
          auto* mine = static_cast<Operand*>(operands[lane]);
          if (mine == nullptr) continue;
          if (!(mask >> mine->source & 1))
            throw Error(
                "a shuffle reads lane " + std::to_string(mine->source) +
                ", which the mask does not name");
          mine->result = static_cast<Operand*>(operands[mine->source])->value;
        }
      },
      where);
  return operand.result;
}

inline int lane() {
  return static_cast<int>(
      (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kLanes);
}

}  // namespace simt

// Within segments of `width` lanes; a source outside the segment is the lane itself.
template <class T>
T __shfl_sync(
    unsigned mask, T value, int source, int width = 32,
    simt::Where where = simt::Where::current()) {
  const int segment = simt::lane() & ~(width - 1);
  return simt::shuffle("__shfl_sync", mask, value, segment | (source & (width - 1)), where);
}
template <class T>
T __shfl_xor_sync(
    unsigned mask, T value, int bits, int width = 32, simt::Where where = simt::Where::current()) {
  const int lane = simt::lane(), end = (lane & ~(width - 1)) + width;
  const int source = lane ^ bits;
  return simt::shuffle("__shfl_xor_sync", mask, value, source < end ? source : lane, where);
}
template <class T>
T __shfl_down_sync(
    unsigned mask, T value, unsigned delta, int width = 32,
    simt::Where where = simt::Where::current()) {
  const int lane = simt::lane(), end = (lane & ~(width - 1)) + width;
  const int source = lane + static_cast<int>(delta);
  return simt::shuffle("__shfl_down_sync", mask, value, source < end ? source : lane, where);
}
template <class T>
T __shfl_up_sync(
    unsigned mask, T value, unsigned delta, int width = 32,
    simt::Where where = simt::Where::current()) {
  const int lane = simt::lane(), begin = lane & ~(width - 1);
  const int source = lane - static_cast<int>(delta);
  return simt::shuffle("__shfl_up_sync", mask, value, source >= begin ? source : lane, where);
}

inline unsigned __ballot_sync(
    unsigned mask, int predicate, simt::Where where = simt::Where::current()) {
  struct Operand {
    int predicate;
    unsigned result;
  } operand{predicate, 0};
  simt::collective(
      "__ballot_sync", mask, false, &operand,
      [](void* const(&operands)[32], uint32_t) {
        unsigned result = 0;
        for (int lane = 0; lane < 32; ++lane)
          if (operands[lane] && static_cast<Operand*>(operands[lane])->predicate)
            result |= 1u << lane;
        for (void* operand : operands)
          if (operand) static_cast<Operand*>(operand)->result = result;
      },
      where);
  return operand.result;
}
inline int __any_sync(unsigned mask, int predicate, simt::Where where = simt::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, simt::Where where = simt::Where::current()) {
  return __ballot_sync(mask, predicate, where) == mask;
}

// One thread runs at a time.
template <class T>
T atomicAdd(T* to, std::type_identity_t<T> value) {
  const T before = *to;
  *to = before + value;
  return before;
}
