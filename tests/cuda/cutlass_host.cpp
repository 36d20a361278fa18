// Runs the epilogues of the CUTLASS kernels on the host: the very types that the kernels are made
// of, compiled by g++, one OS thread per CUDA thread.
//
// The tensor cores' part is played by `dhidden`, dealt to the threads' accumulators as the PTX ISA
// lays them out (mma.m16n8k16: figure "accumulator fragment"; wgmma.m64nNk16: register D) - written
// out here by hand and not with CUTLASS's own layouts, so that a wrong idea of who holds what
// shows.
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cutlass_host_device.h"
//
#include "cuda/cutlass_sm80_stage1.cuh"
#include "cuda/cutlass_sm90a_stage1.cuh"

thread_local uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

using namespace fused_remat::cuda;
using namespace fused_remat::cuda::stage1;

constexpr int kThreads = 128;  // of a block (sm_80), of a warpgroup (sm_90)
std::barrier<> barrier(kThreads);

struct HostBarrier {
  static void wait(int threads) {
    if (threads != kThreads) std::abort();
    barrier.arrive_and_wait();
  }
};

template <class Body>
void for_all_threads(const Body& body) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&, thread] { body(thread); });
  for (std::thread& thread : threads) thread.join();
}

struct Dhidden {
  const float* data;  // [rows, features], dense
  int64_t rows, features;

  // What the main loop makes of rows and features that are not there is zeros; the epilogue must
  // not use it, so here it is NaN.
  float at(int64_t row, int64_t feature) const {
    return row < rows && feature < features ? data[row * features + feature] : NAN;
  }
};

template <class T, bool kGated>
void run_sm80(const EpilogueParams& params, const Dhidden& dhidden) {
  using Config = Sm80Config<T, kGated>;
  using Epilogue = typename Config::Epilogue;
  using Warp = typename Config::WarpShape;
  constexpr int kWarpsM = Config::BlockShape::kM / Warp::kM;
  constexpr int kMmaM = Warp::kM / 16, kMmaN = Warp::kN / 8;
  const cute::Shape<int32_t, int32_t, int32_t> problem(dhidden.rows, dhidden.features, 1);
  const auto storage = std::make_unique<typename Epilogue::SharedStorage>();
  for (int m = 0; m * Config::BlockShape::kM < dhidden.rows; ++m)
    for (int n = 0; n * Config::BlockShape::kN < dhidden.features; ++n)
      for_all_threads([&](int thread) {
        const int warp = thread / 32, lane = thread % 32;
        const int64_t row0 = m * Config::BlockShape::kM + warp % kWarpsM * Warp::kM;
        const int64_t feature0 = n * Config::BlockShape::kN + warp / kWarpsM * Warp::kN;
        typename Epilogue::AccumulatorTile accumulators;
        static_assert(Epilogue::AccumulatorTile::kElements == kMmaM * kMmaN * 4);
        for (int i = 0; i < kMmaM; ++i)
          for (int j = 0; j < kMmaN; ++j)
            for (int c = 0; c < 4; ++c)
              accumulators[(j * kMmaM + i) * 4 + c] = dhidden.at(
                  row0 + i * 16 + lane / 4 + 8 * (c / 2), feature0 + j * 8 + lane % 4 * 2 + c % 2);
        Epilogue epilogue(params, *storage, thread, warp, lane);
        epilogue(accumulators, {m, n, 0}, problem, thread);
      });
}

template <class T, bool kGated>
void run_sm90(const EpilogueParams& params, const Dhidden& dhidden) {
  using Config = Sm90Config<T, kGated>;
  using Epilogue = Sm90Epilogue<T, kGated, 128, HostBarrier>;
  // The same but for how threads wait.
  static_assert(std::is_base_of_v<Sm90Epilogue<T, kGated, 128>, typename Config::Epilogue>);
  using BlockShape = typename Config::BlockShape;
  constexpr int kM = cute::size<0>(BlockShape{}), kN = cute::size<1>(BlockShape{});
  constexpr int kSlabs = kM / 64;
  const typename Config::MainLoop::TiledMma tiled_mma;
  const auto storage = std::make_unique<typename Epilogue::SharedStorage>();
  const auto tiles = [](int64_t extent, int tile) {
    return static_cast<int>((extent + tile - 1) / tile);
  };
  const auto problem =
      cute::make_shape(static_cast<int>(dhidden.rows), static_cast<int>(dhidden.features), 8, 1);
  // One tile of rows more than there are, as where a cluster reaches over the edge.
  for (int m = 0; m < tiles(dhidden.rows, kM) + 1; ++m)
    for (int n = 0; n < tiles(dhidden.features, kN); ++n)
      for_all_threads([&](int thread) {
        const int warp = thread / 32, lane = thread % 32;
        auto accumulators = cute::partition_fragment_C(tiled_mma, cute::take<0, 2>(BlockShape{}));
        static_assert(decltype(cute::size(accumulators))::value == kSlabs * kN / 2);
        float* registers = accumulators.data();
        for (int slab = 0; slab < kSlabs; ++slab)
          for (int d = 0; d < kN / 2; ++d)
            registers[slab * (kN / 2) + d] = dhidden.at(
                int64_t{m} * kM + slab * 64 + warp * 16 + lane / 4 + d / 2 % 2 * 8,
                int64_t{n} * kN + d / 4 * 8 + lane % 4 * 2 + d % 2);
        const auto residue = cute::make_tuple(
            static_cast<int>(dhidden.rows) - m * kM, static_cast<int>(dhidden.features) - n * kN,
            0);
        const Epilogue epilogue(params);
        epilogue(
            problem, BlockShape{}, cute::make_coord(m, n, cute::_, 0), accumulators, tiled_mma,
            residue, thread, reinterpret_cast<char*>(storage.get()));
      });
}

template <class T, bool kGated>
void run(bool sm90, const EpilogueParams& params, const Dhidden& dhidden) {
  sm90 ? run_sm90<T, kGated>(params, dhidden) : run_sm80<T, kGated>(params, dhidden);
}

// Visits everything that block (0, 0, 0) loads of the operands in its first step along d_out, and
// counts: loads of an element, and loads outside the matrices or past the step.
template <class Iterator>
int64_t count_loads(
    Iterator& iterator, const uint16_t* matrix, int64_t stride, int rows, int cols,
    int32_t* counts) {
  int64_t outside = 0;
  iterator.set_iteration_index(0);
  for (int i = 0; i < Iterator::ThreadMap::Iterations::kCount * Iterator::kAccessesPerVector; ++i) {
    if (iterator.valid()) {
      const int64_t first = reinterpret_cast<const uint16_t*>(iterator.get()) - matrix;
      for (int64_t at = first; at < first + Iterator::AccessType::kElements; ++at) {
        const int64_t row = at / stride, col = at % stride;
        row < rows&& col < cols ? ++counts[row * cols + col] : ++outside;
      }
    }
    ++iterator;
  }
  return outside;
}

}  // namespace

void __syncthreads() { barrier.arrive_and_wait(); }

#pragma GCC visibility push(default)
extern "C" {

const char* why_not(const Stage1Gemm& gemm) { return why_not_stage1_gemm(gemm); }

// Stage 1 with `dhidden` given, by the epilogue of one of the kernels.
void epilogue(const Stage1Gemm& gemm, const float* dhidden, bool sm90) {
  const EpilogueParams params = epilogue_params(gemm);
  const Dhidden product{dhidden, gemm.rows, gemm.features};
  const bool half = gemm.dtype == Dtype::kHalf;
  if (gemm.gated())
    half ? run<c10::Half, true>(sm90, params, product)
         : run<c10::BFloat16, true>(sm90, params, product);
  else
    half ? run<c10::Half, false>(sm90, params, product)
         : run<c10::BFloat16, false>(sm90, params, product);
}

// Loads of the sm_80 kernel's first step by the block of tile (m, n): of_dy [rows, d_out], of_w
// [d_out, features]. Returns the loads that reach outside.
int64_t sm80_loads(const Stage1Gemm& gemm, int m, int n, int32_t* of_dy, int32_t* of_w) {
  using Config = Sm80Config<c10::BFloat16, false>;
  using Mma = typename Config::Base::Mma;
  const int rows = gemm.rows, features = gemm.features, d_out = gemm.d_out;
  const auto* dy = static_cast<const uint16_t*>(gemm.dy.data);
  const auto* w_down = static_cast<const uint16_t*>(gemm.w_down.data);
  const auto pointer = [](const void* data) {
    return static_cast<cutlass::bfloat16_t*>(const_cast<void*>(data));
  };
  int64_t outside = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    typename Mma::IteratorA a(
        {cutlass::layout::RowMajor(gemm.dy.stride)}, pointer(dy), {rows, d_out}, thread,
        {m * Config::BlockShape::kM, 0});
    typename Mma::IteratorB b(
        {cutlass::layout::RowMajor(gemm.w_down.stride)}, pointer(w_down), {d_out, features}, thread,
        {0, n * Config::BlockShape::kN});
    outside += count_loads(a, dy, gemm.dy.stride, rows, d_out, of_dy);
    outside += count_loads(b, w_down, gemm.w_down.stride, d_out, features, of_w);
  }
  return outside;
}

int64_t sm80_shared_bytes() {
  return sizeof(Sm80Config<c10::BFloat16, true>::Kernel::SharedStorage);
}
}
#pragma GCC visibility pop
