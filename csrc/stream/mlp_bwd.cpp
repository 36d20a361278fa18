// Backward, streamed over feature or token chunks. Per tile: stage 1 (level 3) rebuilds what was
// not kept and makes hidden, dup and dgate; stage 2 is library GEMMs into the gradients. Fixed
// order, no atomics: the same bits every time.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "../mlp_calls.h"
#include "gradient_sum.h"
#include "low_rank.h"
#include "mlp_small.h"
#include "tiles.h"

namespace fused_remat {

using at::Tensor;

namespace {

class BackwardPass {
 public:
  BackwardPass(
      const Tensor& dy, const Tensor& x, const MlpLayer& layer, const Tensor& up,
      const Tensor& gate, const Tensor& seed, const MlpOptions& options,
      const MlpGradientMask& wanted, const MlpGradientMask& wide)
      : layer_(layer),
        options_(options),
        wanted_(wanted),
        wide_(wide),
        pre_wanted_(
            any({kDwUp, kDbUp, kDwGate, kDbGate, kDUpA, kDUpB, kDGateA, kDGateB}) || wants_x()),
        sizes_(mlp_sizes(x, layer)),
        precision_(mlp_precision(options.compute_dtype, options.backend, x.is_cpu())),
        x_(as_rows(x)),
        dy_(as_rows(dy)),
        up_(up),
        gate_(gate),
        packing_(packing()),
        stage1_{
            options.backend, options.activation, options.dropout_p > 0, up.size(1) + gate.size(1)},
        plan_(plan_tiles(
            sizes_.rows, sizes_.hidden_features, backward_by_features(sizes_),
            tile_goal(x.is_cpu(), /*backward=*/true),
            backward_cost(
                sizes_, precision_, packing_, stage1_, x.scalar_type(), layer.w_up.scalar_type(),
                bool(options.norm)),
            options.workspace)),
        workspace_(plan_.bytes, x.device()),
        weights_(
            layer, sizes_, packing_, /*down_rows=*/true, plan_.features, precision_.gemm,
            workspace_),
        tile_{seed, options.activation, options.dropout_p, 0, 0, sizes_.hidden_features},
        gradients_(make_gradients(x)),
        factors_(layer, precision_.gemm, workspace_),
        adapters_(
            layer, sizes_, precision_, wanted, wants_x(), plan_, gradients_, factors_, workspace_) {
    take_buffers();
  }

  MlpGradients run() {
    if (plan_.by_features) {
      over_features([&](int64_t f0, int64_t features) {
        const MlpLayer& weights = weights_.tile(f0, features);
        over_rows([&](int64_t m0, int64_t rows) { tile(rows_tile(m0, rows), m0, f0, weights); });
        for (const GradientSum& sum : {dw_up_, dw_gate_, dw_down_}) sum.finish_chunk(f0, features);
      });
    } else {
      over_rows([&](int64_t m0, int64_t rows) {
        const RowsTile inputs = rows_tile(m0, rows);
        over_features([&](int64_t f0, int64_t features) {
          tile(inputs, m0, f0, weights_.tile(f0, features));
        });
        finish_rows(m0, rows);
      });
    }
    if (plan_.by_features && (adapters_.takes_rows() || (options_.norm && wants_x())))
      over_rows([&](int64_t m0, int64_t rows) { finish_rows(m0, rows); });
    if (!options_.norm) dx_.finish();
    for (const GradientSum& sum : {dw_up_, dw_gate_, dw_down_}) sum.finish();
    adapters_.finish();
    for (const MlpGradient vector : {kDbUp, kDbGate, kDbDown, kDNormWeight, kDNormBias})
      if (wanted_[vector] && !vector_sums_[vector].is_same(gradients_[vector]))
        gradients_[vector].copy_(vector_sums_[vector]);
    return gradients_;
  }

 private:
  struct RowsTile {
    Tensor x, dy;
  };

  template <class Body>
  void over_rows(const Body& body) const {
    for (int64_t m0 = 0; m0 < sizes_.rows; m0 += plan_.rows)
      body(m0, std::min(plan_.rows, sizes_.rows - m0));
  }
  template <class Body>
  void over_features(const Body& body) const {
    for (int64_t f0 = 0; f0 < sizes_.hidden_features; f0 += plan_.features)
      body(f0, std::min(plan_.features, sizes_.hidden_features - f0));
  }

  bool any(std::initializer_list<MlpGradient> of) const {
    return std::any_of(of.begin(), of.end(), [&](MlpGradient which) { return wanted_[which]; });
  }
  // Whether the gradient of what the projections take from x flows anywhere.
  bool wants_x() const { return any({kDx, kDNormWeight, kDNormBias}); }
  bool wants_hidden() const { return any({kDwDown, kDDownA, kDDownB}); }

  MlpPacking packing() const {
    const bool dense = dense_weights(layer_, precision_.gemm);
    const auto pack = [&](const Tensor& rows, bool made) {
      return made || rows.scalar_type() != precision_.gemm || !has_dense_rows(rows);
    };
    return {
        pack(x_, options_.norm || sizes_.ranks_in() > 0), pack(dy_, sizes_.rank_down > 0),
        !dense || sizes_.ranks_in() > 0, !dense || sizes_.rank_down > 0};
  }

  // The gradients that take whole sums over the features of these rows.
  void finish_rows(int64_t m0, int64_t rows) {
    if (adapters_.takes_rows() && sizes_.hidden_features > 0) {
      const RowsTile inputs = rows_tile(m0, rows);
      adapters_.finish_rows(
          inputs.x, inputs.dy, m0, wants_x() ? dx_.tile(m0, rows) : Tensor(), product_);
    }
    if (!options_.norm) return dx_.finish_chunk(m0, rows);
    if (!wants_x()) return;
    const auto wanted_sum = [&](MlpGradient which) {
      return wanted_[which] ? vector_sums_[which] : Tensor();
    };
    const Tensor dx = wanted_[kDx]
                          ? gradients_[kDx].view({sizes_.rows, sizes_.d_in}).narrow(0, m0, rows)
                          : Tensor();
    calls::normalize_rows_backward(
        options_.backend, dx_.tile(m0, rows), x_.narrow(0, m0, rows), options_.norm, dx,
        wanted_sum(kDNormWeight), wanted_sum(kDNormBias));
  }

  MlpGradients make_gradients(const Tensor& x) {
    MlpGradients made;
    const bool no_tiles = sizes_.rows == 0 || sizes_.hidden_features == 0;
    const auto like = [&](MlpGradient which, const Tensor& operand) {
      if (!wanted_[which]) return at::empty({0}, operand.options());
      const at::TensorOptions options =
          wide_[which] ? operand.options().dtype(precision_.accumulate) : operand.options();
      return no_tiles ? at::zeros_like(operand, options) : at::empty_like(operand, options);
    };
    const auto vector_like = [&](MlpGradient which, const OptionalTensor& bias) {
      Tensor& sum = vector_sums_[which];
      sum =
          at::zeros({wanted_[which] ? bias->size(0) : 0}, x.options().dtype(precision_.accumulate));
      if (!wanted_[which]) return at::empty({0}, bias.value_or(x).options());
      const bool direct = wide_[which] || bias->scalar_type() == precision_.accumulate;
      return direct ? sum : at::empty_like(*bias);
    };
    // x may overlap itself or skip memory; its gradient is dense.
    made[kDx] = !wanted_[kDx] ? at::empty({0}, x.options())
                : no_tiles    ? at::zeros(x.sizes(), x.options())
                              : at::empty(x.sizes(), x.options());
    made[kDwUp] = like(kDwUp, layer_.w_up);
    made[kDwDown] = like(kDwDown, layer_.w_down);
    made[kDwGate] = like(kDwGate, layer_.w_gate.value_or(layer_.w_up));
    made[kDbUp] = vector_like(kDbUp, layer_.b_up);
    made[kDbDown] = vector_like(kDbDown, layer_.b_down);
    made[kDbGate] = vector_like(kDbGate, layer_.b_gate);
    made[kDNormWeight] = vector_like(kDNormWeight, options_.norm.weight);
    made[kDNormBias] = vector_like(kDNormBias, options_.norm.bias);
    const auto factor_like = [&](MlpGradient which, const OptionalTensor& factor) {
      made[which] = like(which, factor.value_or(x));
    };
    factor_like(kDUpA, layer_.up_adapter.a);
    factor_like(kDUpB, layer_.up_adapter.b);
    factor_like(kDGateA, layer_.gate_adapter.a);
    factor_like(kDGateB, layer_.gate_adapter.b);
    factor_like(kDDownA, layer_.down_adapter.a);
    factor_like(kDDownB, layer_.down_adapter.b);
    return made;
  }

  void take_buffers() {
    const int64_t elements = plan_.rows * plan_.features;
    const auto take = [&](bool needed, int64_t numel) {
      return needed ? workspace_.take(numel, precision_.gemm) : Tensor();
    };
    hidden_ = take(true, elements);
    dup_ = take(pre_wanted_, elements);
    dgate_ = take(sizes_.gated, elements);
    const int64_t scratch =
        backward_scratch(sizes_, precision_, stage1_, plan_.rows, plan_.features);
    scratch_ = take(scratch > 0, scratch / static_cast<int64_t>(c10::elementSize(precision_.gemm)));
    packed_x_ = take(packing_.x, plan_.rows * sizes_.x_stride());
    packed_dy_ = take(packing_.dy, plan_.rows * sizes_.dy_stride());
    const int64_t rank = sizes_.widest_rank(), wider = std::max(sizes_.d_in, sizes_.d_out);
    product_ = take(
        precision_.gemm != precision_.accumulate,
        std::max(
            {plan_.rows * std::max(sizes_.d_in, rank), plan_.features * std::max(wider, rank),
             wider * rank}));
    const auto sum = [&](MlpGradient which, int64_t axis) {
      const bool by_rows = which == kDx;
      if (!(by_rows ? wants_x() : wanted_[which])) return GradientSum();
      const Tensor gradient = by_rows ? dx_target() : gradients_[which];
      // Gated layers and adapters add further products to each tile of dx.
      const bool one_term = by_rows ? plan_.features >= sizes_.hidden_features && !sizes_.gated &&
                                          !options_.norm && sizes_.ranks_in() == 0
                                    : plan_.rows >= sizes_.rows;
      const bool outer = by_rows != plan_.by_features;
      return GradientSum(
          gradient, axis, outer, one_term, by_rows ? plan_.rows : plan_.features, precision_,
          workspace_);
    };
    dx_ = sum(kDx, 0);
    dw_up_ = sum(kDwUp, 0);
    dw_gate_ = sum(kDwGate, 0);
    dw_down_ = sum(kDwDown, 1);
  }

  // What sums to dx, or before the norm's own gradient to that of what it made.
  Tensor dx_target() const {
    const int64_t shape[] = {sizes_.rows, sizes_.d_in};
    return wanted_[kDx] ? gradients_[kDx].view(shape)
                        : at::empty(shape, x_.options().dtype(precision_.accumulate));
  }

  // The token rows as the GEMMs want them. Packed once where the same rows serve several tiles in a
  // row.
  RowsTile rows_tile(int64_t m0, int64_t rows) {
    if (m0 != packed_row0_) {
      const Tensor x = x_.narrow(0, m0, rows), dy = dy_.narrow(0, m0, rows);
      if (pre_wanted_ || wants_hidden())
        rows_ = {
            rows_with_adapters(
                options_.backend, x, options_.norm, precision_, layer_, sizes_, factors_,
                packed_x_),
            gradient_rows_with_adapters(dy, layer_, sizes_, factors_, packed_dy_)};
      else
        rows_ = {x, packed(dy, packed_dy_)};
      packed_row0_ = m0;
    }
    return rows_;
  }

  void tile(const RowsTile& inputs, int64_t m0, int64_t f0, const MlpLayer& weights) {
    const int64_t rows = inputs.x.size(0), features = weights.w_up.size(0);
    if (wanted_[kDbDown] && f0 == 0)
      calls::column_sums(
          options_.backend, inputs.dy.narrow(1, 0, sizes_.d_out), vector_sums_[kDbDown]);
    if (!pre_wanted_ && !wants_hidden()) return;
    const MlpBuffers made = stage1(inputs, m0, f0, weights);
    const bool first_rows = m0 == 0, first_features = f0 == 0;
    const auto in = [&](const Tensor& matrix) { return matrix.narrow(1, 0, sizes_.d_in); };
    adapters_.add_tile({inputs.x, inputs.dy, weights, made, m0, f0}, product_);
    if (wanted_[kDwDown]) {
      const Tensor dy = inputs.dy.narrow(1, 0, sizes_.d_out);
      add_product(dw_down_.tile(f0, features), dy.t(), made.hidden, first_rows, product_);
    }
    if (wanted_[kDwUp])
      add_product(dw_up_.tile(f0, features), made.dup.t(), in(inputs.x), first_rows, product_);
    if (wanted_[kDwGate])
      add_product(dw_gate_.tile(f0, features), made.dgate.t(), in(inputs.x), first_rows, product_);
    if (!wants_x()) return;
    const Tensor dx = dx_.tile(m0, rows);
    add_product(dx, made.dup, in(weights.w_up), first_features, product_);
    if (sizes_.gated) add_product(dx, made.dgate, in(*weights.w_gate), /*first=*/false, product_);
  }

  MlpBuffers stage1(const RowsTile& inputs, int64_t m0, int64_t f0, const MlpLayer& weights) {
    const int64_t rows = inputs.x.size(0), features = weights.w_up.size(0);
    const auto buffer = [&](const Tensor& flat) {
      return flat.defined() ? matrix(flat, rows, features) : matrix(hidden_, 0, features);
    };
    // aten writes to a matrix, cuda takes what it needs from flat memory.
    const Tensor scratch = options_.backend == "cuda" ? scratch_ : buffer(scratch_);
    const MlpBuffers buffers{buffer(hidden_), buffer(dup_), buffer(dgate_), scratch};
    const auto bias_tile = [&](MlpGradient bias) {
      return wanted_[bias] ? vector_sums_[bias].narrow(0, f0, features) : vector_sums_[bias];
    };
    tile_.row0 = m0;
    tile_.feature0 = f0;
    calls::mlp_bwd_chunk(
        options_.backend, inputs.x, inputs.dy, weights, tile_,
        {residual_tile(up_, m0, rows, f0, features), residual_tile(gate_, m0, rows, f0, features)},
        buffers, bias_tile(kDbUp), bias_tile(kDbGate));
    return buffers;
  }

  const MlpLayer& layer_;
  const MlpOptions& options_;
  const MlpGradientMask &wanted_, &wide_;
  const bool pre_wanted_;  // any gradient that flows through the activation
  const MlpSizes sizes_;
  const MlpPrecision precision_;
  const Tensor x_, dy_, up_, gate_;
  const MlpPacking packing_;
  const MlpStage1 stage1_;
  const TilePlan plan_;
  Workspace workspace_;
  WeightTiles weights_;
  MlpTile tile_;
  MlpGradients vector_sums_;  // only the entries of biases and the norm
  const MlpGradients gradients_;
  const RowFactors factors_;
  const AdapterGradients adapters_;
  GradientSum dx_, dw_up_, dw_gate_, dw_down_;
  RowsTile rows_;
  int64_t packed_row0_ = -1;
  // Flat workspace pieces; undefined where not needed.
  Tensor hidden_, dup_, dgate_, scratch_, packed_x_, packed_dy_, product_;
};

}  // namespace

MlpGradients mlp_bwd(
    const Tensor& dy, const Tensor& x, const MlpLayer& layer, const Tensor& up, const Tensor& gate,
    const Tensor& seed, const MlpOptions& options, const MlpGradientMask& wanted,
    const MlpGradientMask& wide) {
  check_mlp(x, layer, seed, options);
  TORCH_CHECK_VALUE(
      dy.dim() == x.dim() && dy.sizes().slice(0, dy.dim() - 1) == x.sizes().slice(0, x.dim() - 1) &&
          dy.size(-1) == layer.w_down.size(0),
      "mlp_bwd: dy is ", dy.sizes(), ", expected the shape of y, ", x.sizes(), " with ",
      layer.w_down.size(0), " last");
  for (const Tensor& residual : {up, gate})
    TORCH_CHECK_VALUE(
        residual.dim() == 2 && residual.size(1) <= layer.w_up.size(0) &&
            residual.scalar_type() == options.compute_dtype &&
            (residual.size(1) == 0 || residual.size(0) == row_count(x)),
        "mlp_bwd: residuals are [M, 0..F] in the compute dtype, got ", residual.sizes(), " of ",
        residual.scalar_type());
  const BelowAutocast guard;
  if (why_not_one_kernel(x, layer, options, /*keeps=*/up.size(1) + gate.size(1) > 0).empty())
    return mlp_small_bwd(dy, x, layer, seed, options, wanted, wide);
  return BackwardPass(dy, x, layer, up, gate, seed, options, wanted, wide).run();
}

}  // namespace fused_remat
