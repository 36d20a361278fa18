// What a kernel and its launcher stand on, whoever compiles them: nvcc for a GPU, or g++ with
// FUSED_REMAT_SIMT for the host runner of tests/simt. No other header of csrc/cuda asks which.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#if defined(FUSED_REMAT_SIMT)
#include "simt.h"
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include <cuda_runtime_api.h>
#endif

namespace fused_remat::cuda {

using Stream = cudaStream_t;

enum class Dtype { kFloat, kDouble, kHalf, kBFloat16 };

// f(T{}) with the C++ type of `dtype`.
template <class F>
void with_dtype(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat:
      return f(float{});
    case Dtype::kDouble:
      return f(double{});
    case Dtype::kHalf:
      return f(c10::Half{});
    case Dtype::kBFloat16:
      return f(c10::BFloat16{});
  }
}

// What values of T are added up in.
template <class T>
struct AccumulateOf {
  using type = float;
};
template <>
struct AccumulateOf<double> {
  using type = double;
};
template <class T>
using Accumulate = typename AccumulateOf<T>::type;

// Blocks that a launch may have in x; a kernel with more work loops.
constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
constexpr int kWarpSize = 32;

#if defined(FUSED_REMAT_SIMT)

// The dynamic shared memory of this block, 16-byte aligned.
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(simt::dynamic_shared());
}

template <class... P, class... A>
void launch(
    const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, Stream,
    A&&... args) {
  std::tuple<P...> parameters(std::forward<A>(args)...);
  simt::run_grid(name, grid, block, shared_bytes, [&] { std::apply(kernel, parameters); });
}

#else

#if defined(__CUDACC__)
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char fused_remat_dynamic_shared[];
  return reinterpret_cast<T*>(fused_remat_dynamic_shared);
}
#endif

// Raises std::runtime_error unless `status` is a success.
inline void check(const char* name, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next, innocent call would report it
  throw std::runtime_error(
      std::string("fused_remat: CUDA kernel ") + name + ": " + cudaGetErrorString(status));
}

// Launches `kernel` on the current device; an empty grid is no launch. Safe while a graph is
// captured.
template <class... P, class... A>
void launch(
    const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
    Stream stream, A&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  // Of dynamic and static memory together, and more than any of our kernels has of the latter.
  constexpr size_t kSharedWithoutAsking = 48 * 1024, kMostStatic = 8 * 1024;
  if (shared_bytes > kSharedWithoutAsking - kMostStatic)
    check(
        name, cudaFuncSetAttribute(
                  reinterpret_cast<const void*>(kernel),
                  cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  std::tuple<P...> parameters(std::forward<A>(args)...);
  std::apply(
      [&](auto&... parameter) {
        void* pointers[] = {static_cast<void*>(&parameter)..., nullptr};
        check(
            name, cudaLaunchKernel(
                      reinterpret_cast<const void*>(kernel), grid, block, pointers, shared_bytes,
                      stream));
      },
      parameters);
}

#endif

}  // namespace fused_remat::cuda
