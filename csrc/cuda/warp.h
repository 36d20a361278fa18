// What the threads of a warp or block do together: PTX that has no C++ name, behind functions, and
// sums in a fixed order. The PTX has host twins in tests/simt/warp_twins.h.
#pragma once

#include "platform.h"

namespace fused_remat::cuda {

#if defined(FUSED_REMAT_SIMT)
}  // namespace fused_remat::cuda
#include "warp_twins.h"
namespace fused_remat::cuda {
#else

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// d [16, 8] += a [16, 16] b [16, 8], a row- and b column-major, in fragments as PTX lays them out:
// lane l, with g = l / 4 and t = l % 4, holds
//   a[i]: row g + 8 * (i % 2),  columns 2 t + 8 * (i / 2) and the next (low half first)
//   b[i]: rows 2 t + 8 * i and the next, column g
//   d[i]: row g + 8 * (i / 2),  column 2 t + i % 2
// T is c10::Half or c10::BFloat16; every lane of the warp takes part.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(
    float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#define FUSED_REMAT_MMA(T, ptx_type)                                                    \
  template <>                                                                           \
  __device__ __forceinline__ void mma_m16n8k16<T>(                                      \
      float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ptx_type "." ptx_type         \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));   \
  }
FUSED_REMAT_MMA(c10::Half, "f16")
FUSED_REMAT_MMA(c10::BFloat16, "bf16")
#undef FUSED_REMAT_MMA

// 8 x 8 matrices of 16-bit elements out of shared memory: matrix i has its rows of 16 bytes at the
// addresses that lanes 8 i .. 8 i + 7 pass. Lane l receives in r[i] the elements 2 (l % 4) and the
// next of row l / 4; `_trans`: of column l / 4. Every lane of the warp takes part; of x2 the lanes
// 16 .. 31 pass any valid address.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared_row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared_row))
               : "memory");
}

// 16 bytes from global to shared memory, both 16-byte aligned, without passing registers; zeros
// where not `in_bounds` (`global` is then not read). Copies since the last commit form a group;
// cp_async_wait returns when all but the newest kPending groups of this thread have landed, for
// this thread: others see them behind a barrier.
__device__ __forceinline__ void cp_async_16(
    void* shared, const void* global, bool in_bounds = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(in_bounds ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif

// The sum over the 32 lanes of a warp: all get it, the same bits.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// The sum over a block of whole warps: all threads get it, the same bits. `shared` [32] is free
// again on return.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* shared) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned warps = blockDim.x * blockDim.y * blockDim.z / kWarpSize;
  value = warp_sum(value);
  if (thread % kWarpSize == 0) shared[thread / kWarpSize] = value;
  __syncthreads();
  T sum = shared[0];
  for (unsigned warp = 1; warp < warps; ++warp) sum += shared[warp];
  __syncthreads();
  return sum;
}

}  // namespace fused_remat::cuda
