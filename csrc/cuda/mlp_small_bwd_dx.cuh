// The blocks of the backward kernel that make dx: token tiles, over all hidden features. As in the
// forward kernel the gradients of the hidden features go from accumulators into the operand of the
// next product.
#pragma once

#include "mlp_small_chunks.cuh"
#include "mlp_small_element.cuh"

namespace fused_remat::cuda::small {

struct DxPlan {
  ChunkPlan chunks;
  int64_t tiles;   // of kTileRows token rows
  int64_t blocks;  // that share them
};

template <class T, int kBucket, bool kGated>
__device__ __forceinline__ void dx_block(
    const SmallBackward& p, const DxPlan& plan, int64_t block) {
  constexpr int kSteps = kBucket / 16;
  const int64_t features = p.layer.w_up.rows;
  float* b_up = dynamic_shared<float>();
  float* b_gate = b_up + mlp_small::kMostFeatures;
  stage_bias(b_up, p.layer.b_up, 0, mlp_small::kMostFeatures);
  if constexpr (kGated) stage_bias(b_gate, p.layer.b_gate, 0, mlp_small::kMostFeatures);
  WeightChunks<T, kBucket, kGated> weights(
      reinterpret_cast<T*>(b_gate + mlp_small::kMostFeatures), p.layer, plan.chunks.features,
      plan.chunks.chunks);
  DropScales dropout(p.options, features);
  const int lane = lane_of();
  for (int64_t tile = block; tile < plan.tiles; tile += plan.blocks) {
    const int64_t row = tile * mlp_small::kTileRows + warp_of() * 16;
    A x[kSteps], dy[kSteps];
    load_rows<T>(x, p.x, row);
    load_rows<T>(dy, p.dy, row);
    Pair dx[kSteps];
#pragma unroll
    for (int n = 0; n < kSteps; ++n) clear(dx[n]);
    for (int chunk = 0; chunk < plan.chunks.chunks; ++chunk) {
      weights.acquire();
      for (int f = 0; f < plan.chunks.features; f += 16) {
        const int64_t feature = static_cast<int64_t>(chunk) * plan.chunks.features + f;
        if (feature >= features) break;
        const T *w_up = weights.up() + f * weights.kStride,
                *w_gate = weights.gate() + f * weights.kStride;
        Pair up, gate, dhidden;
        times_rows(up, x, w_up, weights.kStride);
        if constexpr (kGated) times_rows(gate, x, w_gate, weights.kStride);
        times_columns(dhidden, dy, weights.down() + f, weights.down_stride());
        differentiate<T, kGated>(
            up, gate, dhidden, p.options.activation, dropout, FeaturesInColumns{row, feature},
            b_up + feature, b_gate + feature, p.x.rows, features);
        A dup, dgate;
        as_operand<T>(dup, dhidden);
        if constexpr (kGated) as_operand<T>(dgate, gate);
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, wide_trans(w_up + n * 16, weights.kStride));
          multiply<T>(dx[n], dup, b);
          if constexpr (kGated) {
            ldmatrix_x4_trans(b, wide_trans(w_gate + n * 16, weights.kStride));
            multiply<T>(dx[n], dgate, b);
          }
        }
      }
      weights.release();
    }
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n)
      for (int half = 0; half < 2; ++half)
        store_pair<T>(
            p.dx, row + lane / 4 + half * 8, n * 8 + lane % 4 * 2, dx[n / 2][n % 2][half * 2],
            dx[n / 2][n % 2][half * 2 + 1]);
  }
}

}  // namespace fused_remat::cuda::small
