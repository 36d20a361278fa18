// Stage 1 (cutlass_stage1.h) for Hopper: a persistent, warp-specialised TMA + wgmma GEMM. Two
// warpgroups take tiles in turns (pingpong): the epilogue of one, long with an exact GELU and
// dropout, runs under the main loop of the other.

// An assert in device code is a function call, and a kernel with one runs its wgmma instructions
// one by one.
#if !defined(NDEBUG)
#define NDEBUG
#endif
// CUTLASS captures `this` by copy without saying so, which C++20 deprecates.
#pragma nv_diag_suppress 2908

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cutlass_launch.cuh"
#include "cutlass_sm90a_stage1.cuh"

namespace fused_remat::cuda {

namespace stage1 {
namespace {

constexpr const char* kName = "cutlass_stage1_sm90a";

int multiprocessors() {
  int device = 0, count = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
    throw std::runtime_error(std::string(kName) + ": " + cudaGetErrorString(error));
  if (cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    throw std::runtime_error(std::string(kName) + ": " + cudaGetErrorString(error));
  return count;
}

template <class T, bool kGated>
struct Sm90 {
  using Config = Sm90Config<T, kGated>;
  using Element = typename Config::Element;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, typename Config::MainLoop, typename Config::Epilogue>>;

  static void run(const Stage1Gemm& gemm, Stream stream) {
    typename Gemm::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = {
        static_cast<int>(gemm.rows), static_cast<int>(gemm.features), static_cast<int>(gemm.d_out),
        1};
    arguments.mainloop.ptr_A = static_cast<const Element*>(gemm.dy.data);
    arguments.mainloop.dA = {gemm.dy.stride, cute::_1{}, int64_t{0}};
    arguments.mainloop.ptr_B = static_cast<const Element*>(gemm.w_down.data);
    arguments.mainloop.dB = {cute::_1{}, gemm.w_down.stride, int64_t{0}};  // (N, K)
    arguments.epilogue = epilogue_params(gemm);
    arguments.hw_info.sm_count = multiprocessors();
    run_gemm<Gemm>(kName, arguments, stream);
  }
};

}  // namespace
}  // namespace stage1

void cutlass_stage1_sm90a(const Stage1Gemm& gemm, Stream stream) {
  stage1::dispatch<stage1::Sm90>(stage1::kName, gemm, stream);
}

int64_t cutlass_stage1_sm90a_shared_bytes() {
  return stage1::Sm90<c10::Half, true>::Gemm::GemmKernel::SharedStorageSize;
}

}  // namespace fused_remat::cuda
