// Stage 1 for CUTLASS's sm_80 GEMMs: the epilogue as a visitor, and the kernel. One node does
// everything, so that no fragment but the accumulator's passes between nodes.
#pragma once

#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>

#include "cutlass_element.cuh"

namespace fused_remat::cuda::stage1 {

// ThreadMap: which elements of the tile a thread gets once the accumulators have gone through
// shared memory: in each step, fragments of 8 neighbouring features.
template <class T, bool kGated, class ThreadMap>
struct Sm80Visitor {
  static_assert(ThreadMap::kElementsPerAccess == kVector);

  struct SharedStorage {};
  using Arguments = EpilogueParams;
  using Params = EpilogueParams;

  template <class ProblemShape>
  static Params to_underlying_arguments(
      const ProblemShape&, const Arguments& arguments, void* /*workspace*/) {
    return arguments;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(const ProblemShape&, const Arguments&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE Sm80Visitor() {}
  CUTLASS_HOST_DEVICE Sm80Visitor(const Params& params, const SharedStorage&) : params(&params) {}

  const Params* params;

  // Coordinates: [vector, fragment column, fragment row, step] -> (row, feature, 0).
  template <class Coordinates>
  struct Callbacks : cutlass::epilogue::threadblock::EmptyCallbacks {
    static constexpr int kColumns = decltype(cute::size<1>(Coordinates{}))::value;
    static constexpr int kFragments = kColumns * decltype(cute::size<2>(Coordinates{}))::value;

    CUTLASS_DEVICE Callbacks(
        const Params& params, const Coordinates& coordinates, int rows, int features)
        : params(params), coordinates(coordinates), rows(rows), features(features) {}

    const Params& params;
    Coordinates coordinates;
    int rows, features;
    Pre<T, kGated> pre[kFragments];

    // Features come in whole vectors: `features` is a multiple of 8.
    CUTLASS_DEVICE bool inside(int column, int row, int step) const {
      const auto at = coordinates(0, column, row, step);
      return cute::get<0>(at) < rows && cute::get<1>(at) < features;
    }

    // The loads of a step are in flight while the accumulators go through shared memory.
    CUTLASS_DEVICE void begin_step(int step) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kFragments; ++i) {
        const int column = i % kColumns, row = i / kColumns;
        const auto at = coordinates(0, column, row, step);
        if (inside(column, row, step))
          pre[i] = load_pre<T, kGated>(params, cute::get<0>(at), cute::get<1>(at));
      }
    }

    template <class Accumulator, int kSize>
    CUTLASS_DEVICE auto visit(
        int step, int row, int column, int fragment,
        const cutlass::Array<Accumulator, kSize>& accumulators) {
      static_assert(kSize == kVector);
      const auto at = coordinates(0, column, row, step);
      if (inside(column, row, step)) {
        float dhidden[kVector];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVector; ++i) dhidden[i] = accumulators[i];
        finish<T, kGated>(params, cute::get<0>(at), cute::get<1>(at), dhidden, pre[fragment]);
      }
      return accumulators;
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(
      cutlass::gemm::GemmCoord tile, int thread, ProblemShape problem_shape) {
    const auto coordinates = cute::group_modes<3, 6>(
        ThreadMap::partition(cute::make_identity_tensor(problem_shape), thread, tile));
    return Callbacks<std::remove_const_t<decltype(coordinates)>>(
        *params, coordinates, cute::get<0>(problem_shape), cute::get<1>(problem_shape));
  }
};

template <class T, bool kGated>
struct Sm80Config {
  using Element = CutlassElement<T>;
  using RowMajorLayout = cutlass::layout::RowMajor;
  // 3 stages take 48 KiB: two blocks fit in the 99 KiB of 8.6 and 8.9.
  static constexpr int kStages = 3;
  using BlockShape = cutlass::gemm::GemmShape<128, 128, 32>;
  using WarpShape = cutlass::gemm::GemmShape<64, 64, 32>;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;

  using Base = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      Element, RowMajorLayout, cutlass::ComplexTransform::kNone, kVector, Element, RowMajorLayout,
      cutlass::ComplexTransform::kNone, kVector, Element, RowMajorLayout, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, BlockShape, WarpShape,
      cutlass::gemm::GemmShape<16, 8, 16>,
      cutlass::epilogue::thread::LinearCombination<Element, kVector, float, float>, Swizzle,
      kStages, cutlass::arch::OpMultiplyAdd>::GemmKernel;
  using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<
      BlockShape, WarpShape, Element, kVector, /*Stages=*/1>;
  // Not unrolled: the code of all activations stands in it once per fragment of a step.
  using Epilogue = cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<
      typename Base::Epilogue, Sm80Visitor<T, kGated, ThreadMap>, /*Stages=*/1,
      /*IterationsUnroll=*/false>;
  using Kernel =
      cutlass::gemm::kernel::GemmWithEpilogueVisitor<typename Base::Mma, Epilogue, Swizzle>;
};

}  // namespace fused_remat::cuda::stage1
