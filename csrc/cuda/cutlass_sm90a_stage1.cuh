// Stage 1 for CUTLASS's warp-specialised sm_90 GEMMs: the epilogue, and the collectives.
//
// The accumulators of 64 rows at a time go through shared memory, so that a thread gets 8
// neighbouring features: whole 16-byte accesses to memory, whole calls of the dropout generator,
// and a loop that is not unrolled. (A node of CUTLASS's visitor trees would be: the code of every
// activation would stand in the kernel once per pair of accumulators.)
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/detail.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>

#include "cutlass_element.cuh"

namespace fused_remat::cuda::stage1 {

// Waits for the threads that share the epilogue's shared memory.
struct EpilogueBarrier {
  CUTLASS_DEVICE static void wait(int threads) {
    cutlass::arch::NamedBarrier::sync(
        threads, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
  }
};

// An epilogue operator as cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter
// takes it. kFeatures: columns of the block's tile. Two warpgroups that work in turns (pingpong)
// may share one SharedStorage.
template <class T, bool kGated, int kFeatures, class Barrier = EpilogueBarrier>
class Sm90Epilogue {
 public:
  static constexpr int kSlabRows = 64;  // of one wgmma
  // 8 floats more than a row: the 8-byte stores of 4 rows then fall into different banks.
  static constexpr int kStride = kFeatures + 8;
  static_assert(kFeatures % kVector == 0);

  // What CUTLASS's kernels ask of an epilogue. C and D do not exist for it.
  using EpilogueSchedule = cutlass::gemm::EpilogueDefault;
  using DispatchPolicy = cutlass::gemm::EpilogueDefault;
  using ThreadEpilogueOp = Sm90Epilogue;
  using ElementOutput = void;
  using ElementCompute = float;
  using ElementAccumulator = float;
  using ElementScalar = float;
  using ElementC = void;
  using ElementD = void;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideD = StrideC;
  using Arguments = EpilogueParams;
  using Params = EpilogueParams;
  struct SharedStorage {
    alignas(16) float staged[kSlabRows * kStride];
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(
      const ProblemShape&, const Arguments& arguments, void* /*workspace*/) {
    return arguments;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(const ProblemShape&, const Arguments&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(
      const ProblemShape&, const Arguments&, void*, cudaStream_t,
      cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments&) {
    return true;
  }

  CUTLASS_HOST_DEVICE explicit Sm90Epilogue(const Params& params) : params_(params) {}

  // accumulators: (MMA, MMA_M, MMA_N), one slab per MMA_M. `thread`: within the warpgroup.
  template <
      class ProblemShape, class BlockShape, class BlockCoord, class Engine, class Layout,
      class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(
      const ProblemShape&, BlockShape, const BlockCoord& block,
      const cute::Tensor<Engine, Layout>& accumulators, TiledMma tiled_mma, const Residue& residue,
      int thread, char* shared_storage) const {
    constexpr int kThreads = cute::size(TiledMma{});
    constexpr int kTileRows = cute::size<0>(BlockShape{});
    constexpr int kSlabs = kTileRows / kSlabRows;
    static_assert(kThreads == 128, "one warpgroup owns the tile");
    static_assert(cute::size<1>(BlockShape{}) == kFeatures && cute::size<1>(Layout{}) == kSlabs);
    const int rows = cute::get<0>(residue), features = cute::get<1>(residue);  // left from here on
    const int64_t row0 = int64_t{cute::get<0>(block)} * kTileRows;
    const int64_t feature0 = int64_t{cute::get<1>(block)} * kFeatures;

    float* staged = reinterpret_cast<SharedStorage*>(shared_storage)->staged;
    const auto slab_tile = cute::make_tensor(
        cute::make_smem_ptr(staged), cute::Layout<
                                         cute::Shape<cute::Int<kSlabRows>, cute::Int<kFeatures>>,
                                         cute::Stride<cute::Int<kStride>, cute::_1>>{});
    auto mine = tiled_mma.get_thread_slice(thread).partition_C(slab_tile);  // (MMA, 1, MMA_N)

#pragma unroll 1
    for (int slab = 0; slab < kSlabs; ++slab) {
      const int slab_rows = rows - slab * kSlabRows;
      if (slab_rows <= 0) break;  // for all threads alike; at once past the edge, in a cluster
      Barrier::wait(kThreads);    // all have read the slab before
      // Registers have no run-time index.
      cute::for_each(cute::make_seq<kSlabs>{}, [&](auto which) {
        if (which == slab)
          cute::copy(accumulators(cute::_, which, cute::_), mine(cute::_, 0, cute::_));
      });
      Barrier::wait(kThreads);
      finish_slab<kThreads>(
          staged, row0 + slab * kSlabRows, slab_rows < kSlabRows ? slab_rows : kSlabRows, feature0,
          features < kFeatures ? features : kFeatures, thread);
    }
  }

 private:
  // The vectors of the slab, dealt to the threads in row-major order. Features come in whole
  // vectors: `features` is a multiple of 8.
  template <int kThreads>
  CUTLASS_DEVICE void finish_slab(
      const float* staged, int64_t row0, int rows, int64_t feature0, int features,
      int thread) const {
    constexpr int kVectors = kFeatures / kVector;  // per row
    static_assert(kThreads % kVectors == 0, "a thread keeps its column");
    constexpr int kRowStep = kThreads / kVectors;
    const int column = thread % kVectors * kVector;
    if (column >= features) return;
    int row = thread / kVectors;
    // The loads of the next vector are in flight while this one is computed.
    Pre<T, kGated> next;
    if (row < rows) next = load_pre<T, kGated>(params_, row0 + row, feature0 + column);
#pragma unroll 1
    for (; row < rows; row += kRowStep) {
      const Pre<T, kGated> pre = next;
      if (row + kRowStep < rows)
        next = load_pre<T, kGated>(params_, row0 + row + kRowStep, feature0 + column);
      const float* from = staged + row * kStride + column;
      float dhidden[kVector];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; i += 4) {
        const auto four = *reinterpret_cast<const cutlass::Array<float, 4>*>(from + i);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) dhidden[i + j] = four[j];
      }
      finish<T, kGated>(params_, row0 + row, feature0 + column, dhidden, pre);
    }
  }

  Params params_;
};

template <class T, bool kGated>
struct Sm90Config {
  using Element = CutlassElement<T>;
  using RowMajorLayout = cutlass::layout::RowMajor;
  using BlockShape = cute::Shape<cute::_128, cute::_128, cute::_64>;
  // Two blocks share the tile of w_down.
  using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;

  using Epilogue = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
      Sm90Epilogue<T, kGated, cute::size<1>(BlockShape{})>>;
  using MainLoop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajorLayout, kVector,
      Element, RowMajorLayout, kVector, float, BlockShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
};

}  // namespace fused_remat::cuda::stage1
