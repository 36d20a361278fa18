// Stage 1 (cutlass_stage1.h) for Ampere and Ada: a multistage cp.async + mma.sync GEMM.
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include "cutlass_launch.cuh"
#include "cutlass_sm80_stage1.cuh"

namespace fused_remat::cuda {

namespace stage1 {
namespace {

constexpr const char* kName = "cutlass_stage1_sm80";

template <class T, bool kGated>
struct Sm80 {
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<typename Sm80Config<T, kGated>::Kernel>;

  static void run(const Stage1Gemm& gemm, Stream stream) {
    const cutlass::gemm::GemmCoord extents(
        static_cast<int>(gemm.rows), static_cast<int>(gemm.features), static_cast<int>(gemm.d_out));
    const typename Gemm::Arguments arguments(
        cutlass::gemm::GemmUniversalMode::kGemm, extents, /*batch_count=*/1, epilogue_params(gemm),
        gemm.dy.data, gemm.w_down.data, /*ptr_C=*/nullptr, /*ptr_D=*/nullptr, 0, 0, 0, 0,
        gemm.dy.stride, gemm.w_down.stride, /*ldc=*/gemm.features, /*ldd=*/gemm.features);
    run_gemm<Gemm>(kName, arguments, stream);
  }
};

}  // namespace
}  // namespace stage1

void cutlass_stage1_sm80(const Stage1Gemm& gemm, Stream stream) {
  stage1::dispatch<stage1::Sm80>(stage1::kName, gemm, stream);
}

int64_t cutlass_stage1_sm80_shared_bytes() {
  return sizeof(stage1::Sm80<c10::Half, true>::Gemm::GemmKernel::SharedStorage);
}

}  // namespace fused_remat::cuda
