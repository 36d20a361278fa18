// Forward, streamed over token chunks: a chunk's hidden values live in the workspace and its rows
// of y are final.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../mlp_calls.h"
#include "low_rank.h"
#include "mlp_small.h"
#include "tiles.h"

namespace fused_remat {

using at::Tensor;

namespace {

class ForwardPass {
 public:
  ForwardPass(
      const Tensor& x, const MlpLayer& layer, const Tensor& seed, const MlpOptions& options,
      const MlpKeep& keep)
      : layer_(layer),
        options_(options),
        sizes_(mlp_sizes(x, layer)),
        precision_(mlp_precision(options.compute_dtype, options.backend, x.is_cpu())),
        x_(as_rows(x)),
        packing_(packing()),
        plan_(plan_tiles(
            sizes_.rows, sizes_.hidden_features, /*by_features=*/false,
            tile_goal(x.is_cpu(), /*backward=*/false),
            forward_cost(
                sizes_, precision_, packing_, options.backend, options.dropout_p > 0,
                bool(options.norm)),
            options.workspace)),
        workspace_(plan_.bytes, x.device()),
        weights_(
            layer, sizes_, packing_, /*down_rows=*/false, plan_.features, precision_.gemm,
            workspace_),
        factors_(layer, precision_.gemm, workspace_),
        down_adapter_(layer, sizes_, precision_, factors_, plan_, workspace_),
        tile_{seed, options.activation, options.dropout_p, 0, 0, sizes_.hidden_features} {
    const auto residual = x.options().dtype(precision_.compute);
    up_ = at::empty({sizes_.rows, keep.up}, residual);
    gate_ = at::empty({sizes_.rows, keep.gate}, residual);
    take_buffers();
  }

  MlpForward run(const Tensor& x) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = sizes_.d_out;
    Tensor y = at::empty(shape, x.options().dtype(precision_.compute));
    const Tensor rows_of_y = y.view({sizes_.rows, sizes_.d_out});
    for (int64_t m0 = 0; m0 < sizes_.rows; m0 += plan_.rows)
      token_chunk(m0, std::min(plan_.rows, sizes_.rows - m0), rows_of_y);
    return {y, up_, gate_};
  }

 private:
  MlpPacking packing() const {
    const bool adapted = sizes_.ranks_in() > 0, dense = dense_weights(layer_, precision_.gemm);
    return {
        options_.norm || adapted || x_.scalar_type() != precision_.gemm || !has_dense_rows(x_),
        false, adapted || !dense, !dense};
  }

  void take_buffers() {
    const int64_t elements = plan_.rows * plan_.features;
    hidden_ = workspace_.take(elements, precision_.gemm);
    if (sizes_.gated) scratch_ = workspace_.take(elements, precision_.gemm);
    if (packing_.x) packed_x_ = workspace_.take(plan_.rows * sizes_.x_stride(), precision_.gemm);
    // y itself holds the sum over feature chunks where it is as wide as a sum must be, or where
    // there is one term.
    const bool one_term = plan_.features >= sizes_.hidden_features;
    const bool direct = precision_.compute == precision_.accumulate ||
                        (one_term && precision_.compute == precision_.gemm);
    if (!direct) y_sum_ = workspace_.take(plan_.rows * sizes_.d_out, precision_.accumulate);
    if (precision_.gemm != precision_.accumulate && (!direct || sizes_.rank_down > 0))
      product_ =
          workspace_.take(plan_.rows * std::max(sizes_.d_out, sizes_.rank_down), precision_.gemm);
  }

  void token_chunk(int64_t m0, int64_t rows, const Tensor& rows_of_y) {
    const Tensor x = rows_with_adapters(
        options_.backend, x_.narrow(0, m0, rows), options_.norm, precision_, layer_, sizes_,
        factors_, packed_x_);
    Tensor y = rows_of_y.narrow(0, m0, rows);
    Tensor sum = y_sum_.defined() ? matrix(y_sum_, rows, sizes_.d_out) : y;
    for (int64_t f0 = 0; f0 < sizes_.hidden_features; f0 += plan_.features) {
      const int64_t features = std::min(plan_.features, sizes_.hidden_features - f0);
      const MlpLayer& weights = weights_.tile(f0, features);
      const Tensor hidden = hidden_tile(x, weights, m0, f0);
      const bool first = f0 == 0;
      if (first && layer_.b_down && sum.scalar_type() == hidden.scalar_type())
        at::addmm_out(sum, layer_.b_down->to(sum.scalar_type()), hidden, weights.w_down.t());
      else
        add_product(sum, hidden, weights.w_down.t(), first, product_);
      down_adapter_.add_tile(hidden, f0, first, product_);
    }
    if (sizes_.hidden_features > 0) down_adapter_.finish(sum, product_);
    finish(y, sum);
  }

  Tensor hidden_tile(const Tensor& x, const MlpLayer& weights, int64_t m0, int64_t f0) {
    const int64_t rows = x.size(0), features = weights.w_up.size(0);
    MlpBuffers buffers;
    buffers.hidden = matrix(hidden_, rows, features);
    buffers.scratch = matrix(sizes_.gated ? scratch_ : hidden_, sizes_.gated ? rows : 0, features);
    tile_.row0 = m0;
    tile_.feature0 = f0;
    const MlpResiduals residuals{
        residual_tile(up_, m0, rows, f0, features), residual_tile(gate_, m0, rows, f0, features)};
    calls::mlp_fwd_chunk(options_.backend, x, weights, tile_, residuals, buffers);
    return buffers.hidden;
  }

  void finish(Tensor& y, Tensor& sum) {
    if (sizes_.hidden_features == 0) sum.zero_();
    const bool has_bias = sizes_.hidden_features > 0 && sum.scalar_type() == precision_.gemm;
    if (layer_.b_down && !has_bias) sum.add_(*layer_.b_down);
    if (y_sum_.defined()) y.copy_(sum);
  }

  const MlpLayer& layer_;
  const MlpOptions& options_;
  const MlpSizes sizes_;
  const MlpPrecision precision_;
  const Tensor x_;
  const MlpPacking packing_;
  const TilePlan plan_;
  Workspace workspace_;
  WeightTiles weights_;
  const RowFactors factors_;
  const DownAdapter down_adapter_;
  MlpTile tile_;
  Tensor up_, gate_;
  // Flat workspace pieces; undefined where not needed.
  Tensor hidden_, scratch_, packed_x_, y_sum_, product_;
};

}  // namespace

MlpForward mlp_fwd(
    const Tensor& x, const MlpLayer& layer, const Tensor& seed, const MlpOptions& options,
    const MlpKeep& keep) {
  check_mlp(x, layer, seed, options);
  const int64_t features = layer.w_up.size(0);
  TORCH_CHECK_VALUE(
      keep.up >= 0 && keep.up <= features, "mlp: keep_up must be in 0..F = ", features, ", got ",
      keep.up);
  TORCH_CHECK_VALUE(
      keep.gate >= 0 && keep.gate <= (layer.gated() ? features : 0),
      "mlp: keep_gate must be in 0..F of a gated layer and 0 otherwise, got ", keep.gate);
  const BelowAutocast guard;
  if (why_not_one_kernel(x, layer, options, /*keeps=*/keep.up + keep.gate > 0).empty())
    return mlp_small_fwd(x, layer, seed, options);
  return ForwardPass(x, layer, seed, options, keep).run(x);
}

}  // namespace fused_remat
