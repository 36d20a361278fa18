#include "../mlp_element.h"
#include "activation_switch.cuh"
#include "mlp_tile.cuh"

namespace fused_remat::cuda {
namespace {

template <class T, bool kGated>
__global__ void __launch_bounds__(kMlpLanes* kMlpRowThreads, 2)
    mlp_act_kernel(MlpActArgs args, int64_t tasks) {
  using V = Accumulate<T>;
  constexpr int kSize = kVectorSize<T>;
  const MlpTileArgs& tile = args.tile;
  const uint64_t seed =
      tile.dropout.seed == nullptr ? 0 : static_cast<uint64_t>(*tile.dropout.seed);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const MlpPlace<T> at(tile, task);
    if (at.n == 0) continue;
    for (int64_t row = at.row; row < at.row_end; row += kMlpRowThreads) {
      V up[kSize], gate[kSize] = {}, scale[kSize];
      const auto load = [&](const MlpPre& pre, V(&to)[kSize]) {
        load_pre<T>(pre, !args.store_kept, row, at.feature, at.n, to);
        if (!args.store_kept) return;
        const int n_kept = kept_features(pre.kept, at.feature, at.n);
        if (n_kept > 0) store_row<T>(pre.kept, row, at.feature, n_kept, to);
      };
      load(tile.up, up);
      if (kGated) load(tile.gate, gate);
      dropout_scales(tile.dropout, seed, row, at.feature, scale);
      with_activation(tile.activation, [&](auto act) {
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          up[i] = mlp_element::forward<decltype(act)>(up[i], gate[i], kGated, scale[i]);
      });
      store_row<T>(tile.hidden, row, at.feature, at.n, up);
    }
  }
}

}  // namespace

void mlp_act(const MlpActArgs& call, Dtype dtype, Stream stream) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    MlpActArgs args = call;
    MlpTileArgs& tile = args.tile;
    for (MlpMatrix* matrix :
         {&tile.up.values, &tile.up.kept, &tile.gate.values, &tile.gate.kept, &tile.hidden})
      find_alignment(*matrix, sizeof(T));
    const int64_t tasks = mlp_tasks(tile, kMlpTileFeatures<T>);
    const bool gated = tile.gate.values.data != nullptr || tile.gate.kept.data != nullptr;
    launch(
        "mlp_act", gated ? mlp_act_kernel<T, true> : mlp_act_kernel<T, false>,
        dim3(static_cast<unsigned>(tasks < kMaxBlocks ? tasks : kMaxBlocks)),
        dim3(kMlpLanes, kMlpRowThreads), 0, stream, args, tasks);
  });
}

}  // namespace fused_remat::cuda
