#include "../mlp_element.h"
#include "activation_switch.cuh"
#include "mlp_tile.cuh"

namespace fused_remat::cuda {
namespace {

// The row threads' sums of the tile, added in their order and written to its row of `to`.
template <class T, class V, int kSize>
__device__ __forceinline__ void store_sums(
    const V (&sums)[kSize], V* shared /* [kMlpRowThreads, kMlpTileFeatures<T>] */,
    const MlpPlace<T>& at, int64_t features, void* to) {
  constexpr int kFeatures = static_cast<int>(kMlpTileFeatures<T>);
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    shared[threadIdx.y * kFeatures + threadIdx.x * kSize + i] = sums[i];
  __syncthreads();
  const int thread = threadIdx.y * kMlpLanes + threadIdx.x;
  for (int i = thread; i < kFeatures && at.feature0 + i < features;
       i += kMlpLanes * kMlpRowThreads) {
    V sum = shared[i];
    for (int row = 1; row < kMlpRowThreads; ++row) sum += shared[row * kFeatures + i];
    static_cast<V*>(to)[at.row_block * features + at.feature0 + i] = sum;
  }
  __syncthreads();
}

template <class T, bool kGated>
__global__ void __launch_bounds__(kMlpLanes* kMlpRowThreads, 2)
    mlp_dact_kernel(MlpDactArgs args, int64_t tasks) {
  using V = Accumulate<T>;
  constexpr int kSize = kVectorSize<T>;
  __shared__ V shared[kMlpRowThreads * kMlpTileFeatures<T>];
  const MlpTileArgs& tile = args.tile;
  const uint64_t seed =
      tile.dropout.seed == nullptr ? 0 : static_cast<uint64_t>(*tile.dropout.seed);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const MlpPlace<T> at(tile, task);
    V up_sums[kSize] = {}, gate_sums[kSize] = {};
    for (int64_t row = at.row; row < at.row_end && at.n > 0; row += kMlpRowThreads) {
      V up[kSize], gate[kSize] = {}, dhidden[kSize], scale[kSize];
      load_pre<T>(tile.up, /*read_kept=*/true, row, at.feature, at.n, up);
      if (kGated) load_pre<T>(tile.gate, /*read_kept=*/true, row, at.feature, at.n, gate);
      load_row<T>(args.dhidden, row, at.feature, at.n, dhidden);
      dropout_scales(tile.dropout, seed, row, at.feature, scale);
      with_activation(tile.activation, [&](auto act) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const auto made =
              mlp_element::backward<decltype(act)>(up[i], gate[i], dhidden[i], kGated, scale[i]);
          up[i] = made.hidden;
          dhidden[i] = made.dup;
          gate[i] = made.dgate;
        }
      });
      store_row<T>(tile.hidden, row, at.feature, at.n, up);
      store_row<T>(args.dup, row, at.feature, at.n, dhidden);
      if (kGated) store_row<T>(args.dgate, row, at.feature, at.n, gate);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        up_sums[i] += dhidden[i];
        if (kGated) gate_sums[i] += gate[i];
      }
    }
    if (args.partial_up != nullptr)
      store_sums<T>(up_sums, shared, at, tile.features, args.partial_up);
    if (kGated && args.partial_gate != nullptr)
      store_sums<T>(gate_sums, shared, at, tile.features, args.partial_gate);
  }
}

}  // namespace

void mlp_dact(const MlpDactArgs& call, Dtype dtype, Stream stream) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    MlpDactArgs args = call;
    MlpTileArgs& tile = args.tile;
    for (MlpMatrix* matrix :
         {&tile.up.values, &tile.up.kept, &tile.gate.values, &tile.gate.kept, &tile.hidden,
          &args.dhidden, &args.dup, &args.dgate})
      find_alignment(*matrix, sizeof(T));
    const int64_t tasks = mlp_tasks(tile, kMlpTileFeatures<T>);
    launch(
        "mlp_dact",
        args.dgate.data != nullptr ? mlp_dact_kernel<T, true> : mlp_dact_kernel<T, false>,
        dim3(static_cast<unsigned>(tasks < kMaxBlocks ? tasks : kMaxBlocks)),
        dim3(kMlpLanes, kMlpRowThreads), 0, stream, args, tasks);
  });
}

}  // namespace fused_remat::cuda
