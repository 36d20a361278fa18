// The forward of a narrow MLP as one kernel: a warp owns 16 token rows, walks over the hidden
// features 16 at a time, and its hidden values go from the accumulators of the first product
// straight into the operand of the second.
#include "mlp_small_chunks.cuh"
#include "mlp_small_element.cuh"
#include "mlp_small_launch.h"

namespace fused_remat::cuda {
namespace {

using namespace small;

struct ForwardPlan {
  ChunkPlan chunks;
  int64_t tiles;  // of kTileRows token rows
};

template <class T, int kBucket, bool kGated>
__global__ void __launch_bounds__(mlp_small::kThreads)
    mlp_small_fwd_kernel(SmallForward p, ForwardPlan plan) {
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
  for (int64_t tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x) {
    const int64_t row = tile * mlp_small::kTileRows + warp_of() * 16;
    A x[kSteps];
    load_rows<T>(x, p.x, row);
    Pair y[kSteps];
#pragma unroll
    for (int n = 0; n < kSteps; ++n) clear(y[n]);
    for (int chunk = 0; chunk < plan.chunks.chunks; ++chunk) {
      weights.acquire();
      for (int f = 0; f < plan.chunks.features; f += 16) {
        const int64_t feature = static_cast<int64_t>(chunk) * plan.chunks.features + f;
        if (feature >= features) break;
        Pair up, gate;
        times_rows(up, x, weights.up() + f * weights.kStride, weights.kStride);
        if constexpr (kGated)
          times_rows(gate, x, weights.gate() + f * weights.kStride, weights.kStride);
        activate<T, kGated>(
            up, gate, p.options.activation, dropout, FeaturesInColumns{row, feature},
            b_up + feature, b_gate + feature, p.x.rows, features);
        A hidden;
        as_operand<T>(hidden, up);
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          uint32_t b[4];
          ldmatrix_x4(
              b, wide(weights.down() + n * 16 * weights.down_stride() + f, weights.down_stride()));
          multiply<T>(y[n], hidden, b);
        }
      }
      weights.release();
    }
    const int lane = lane_of();
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
      const int64_t column = n * 8 + lane % 4 * 2;
      const float low = load_bias(p.layer.b_down, column),
                  high = load_bias(p.layer.b_down, column + 1);
      for (int half = 0; half < 2; ++half)
        store_pair<T>(
            p.y, row + lane / 4 + half * 8, column, y[n / 2][n % 2][half * 2] + low,
            y[n / 2][n % 2][half * 2 + 1] + high);
    }
  }
}

template <class T>
void launch_forward(const SmallForward& p, Stream stream) {
  const bool gated = p.layer.w_gate.data != nullptr;
  const int64_t bucket = mlp_small::bucket_of(p.x.cols, p.y.cols);
  const ForwardPlan plan{
      plan_chunks(bucket, p.layer.w_up.rows, gated),
      ceil_div(p.x.rows, int64_t(mlp_small::kTileRows))};
  if (plan.tiles == 0) return;
  const dim3 grid(static_cast<unsigned>(plan.chunks.blocks(plan.tiles)));
  with_variant<T>(bucket, gated, [&](auto v) {
    using V = decltype(v);
    launch(
        "mlp_small_forward", mlp_small_fwd_kernel<T, V::kBucket, V::kGated>, grid,
        dim3(mlp_small::kThreads), plan.chunks.shared_bytes, stream, p, plan);
  });
}

}  // namespace

void mlp_small_forward(SmallForward p, Stream stream) {
  describe(p.x, p.options.compute);
  describe(p.y, p.options.compute);
  describe(p.layer, p.options.compute);
  if (p.options.compute == Dtype::kHalf)
    launch_forward<c10::Half>(p, stream);
  else
    launch_forward<c10::BFloat16>(p, stream);
}

}  // namespace fused_remat::cuda
