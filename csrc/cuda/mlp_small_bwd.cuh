// The backward of a narrow MLP as one kernel whose blocks have two roles: parameter gradients (few,
// long; first) and dx (many, short). Both rebuild the hidden values on the chip. Sums have a fixed
// order: the same bits every time. One source file per dtype, to compile side by side.
#pragma once

#include "mlp_small_bwd_dw.cuh"
#include "mlp_small_bwd_dx.cuh"
#include "mlp_small_launch.h"

namespace fused_remat::cuda::small {

template <class T, int kBucket, bool kGated>
__global__ void __launch_bounds__(mlp_small::kThreads, 1)
    mlp_small_bwd_kernel(SmallBackward p, DxPlan plan, int64_t dw_blocks) {
  const int64_t block = blockIdx.x;
  if (block < dw_blocks)
    DwBlock<T, kBucket, kGated>(p, block).run();
  else
    dx_block<T, kBucket, kGated>(p, plan, block - dw_blocks);
}

// Blocks of parameter gradients. Without others, db_down needs one slice alone.
inline int64_t plan_dw_blocks(SmallBackward& p) {
  for (const SmallMatrix* m : {&p.dw_up, &p.dw_gate, &p.dw_down, &p.db_up, &p.db_gate})
    if (m->data != nullptr) return p.slices * p.ranges;
  p.slices = 1;
  return p.db_down.data != nullptr ? p.ranges : 0;
}

template <class T>
void launch_backward(SmallBackward p, Stream stream) {
  for (SmallMatrix* m : {&p.x, &p.dy, &p.dx}) describe(*m, p.options.compute);
  describe(p.layer, p.options.compute);
  const bool gated = p.layer.w_gate.data != nullptr;
  const int64_t bucket = mlp_small::bucket_of(p.x.cols, p.dy.cols);
  DxPlan plan{
      plan_chunks(bucket, p.layer.w_up.rows, gated),
      ceil_div(p.x.rows, int64_t(mlp_small::kTileRows)), 0};
  plan.blocks = p.dx.data == nullptr ? 0 : plan.chunks.blocks(plan.tiles);
  const int64_t dw_blocks = plan_dw_blocks(p);
  if (plan.blocks + dw_blocks == 0) return;
  with_variant<T>(bucket, gated, [&](auto v) {
    using V = decltype(v);
    const int64_t shared = std::max<int64_t>(
        plan.blocks > 0 ? plan.chunks.shared_bytes : 0,
        dw_blocks > 0 ? sizeof(DwShared<T, V::kBucket, V::kGated>) : 0);
    launch(
        "mlp_small_backward", mlp_small_bwd_kernel<T, V::kBucket, V::kGated>,
        dim3(static_cast<unsigned>(plan.blocks + dw_blocks)), dim3(mlp_small::kThreads), shared,
        stream, p, plan, dw_blocks);
  });
}

}  // namespace fused_remat::cuda::small
