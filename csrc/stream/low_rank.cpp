#include "low_rank.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>

#include "../mlp_calls.h"

namespace fused_remat {

using at::Tensor;

namespace {

// out <- scale a b
void scaled_product(const Tensor& out, const Tensor& a, const Tensor& b, double scale) {
  Tensor to = out;
  at::addmm_out(to, to, a, b, /*beta=*/0, /*alpha=*/scale);
}

Tensor row_factor(const OptionalTensor& factor, at::ScalarType gemm, Workspace& workspace) {
  if (!factor) return {};
  if (factor->scalar_type() == gemm && is_dense_weight(*factor)) return *factor;
  return packed(*factor, workspace.take(factor->numel(), gemm));
}

}  // namespace

RowFactors::RowFactors(const MlpLayer& layer, at::ScalarType gemm, Workspace& workspace)
    : up_a(row_factor(layer.up_adapter.a, gemm, workspace)),
      gate_a(row_factor(layer.gate_adapter.a, gemm, workspace)),
      down_b(row_factor(layer.down_adapter.b, gemm, workspace)) {}

Tensor rows_with_adapters(
    const std::string& backend, const Tensor& rows, const Norm& norm, const MlpPrecision& precision,
    const MlpLayer& layer, const MlpSizes& sizes, const RowFactors& factors, const Tensor& flat) {
  if (sizes.ranks_in() == 0) return ready_rows(backend, rows, norm, precision, flat);
  const Tensor wide =
      matrix(flat, rows.size(0), sizes.x_stride()).narrow(1, 0, sizes.d_in + sizes.ranks_in());
  const Tensor x = wide.narrow(1, 0, sizes.d_in);
  if (norm)
    calls::normalize_rows(backend, rows, norm, precision.compute, x);
  else
    x.copy_(rows);
  if (sizes.rank_up > 0)
    scaled_product(
        wide.narrow(1, sizes.d_in, sizes.rank_up), x, factors.up_a.t(), layer.up_adapter.scale);
  if (sizes.rank_gate > 0)
    scaled_product(
        wide.narrow(1, sizes.d_in + sizes.rank_up, sizes.rank_gate), x, factors.gate_a.t(),
        layer.gate_adapter.scale);
  return wide;
}

Tensor gradient_rows_with_adapters(
    const Tensor& rows, const MlpLayer& layer, const MlpSizes& sizes, const RowFactors& factors,
    const Tensor& flat) {
  if (sizes.rank_down == 0) return packed(rows, flat);
  const Tensor wide =
      matrix(flat, rows.size(0), sizes.dy_stride()).narrow(1, 0, sizes.d_out + sizes.rank_down);
  const Tensor dy = wide.narrow(1, 0, sizes.d_out);
  dy.copy_(rows);
  scaled_product(
      wide.narrow(1, sizes.d_out, sizes.rank_down), dy, factors.down_b, layer.down_adapter.scale);
  return wide;
}

DownAdapter::DownAdapter(
    const MlpLayer& layer, const MlpSizes& sizes, const MlpPrecision& precision,
    const RowFactors& factors, const TilePlan& plan, Workspace& workspace)
    : adapter_(layer.down_adapter), b_(factors.down_b) {
  if (!adapter_) return;
  if (adapter_.a->scalar_type() != precision.gemm || !is_dense_weight(*adapter_.a))
    a_tile_ = workspace.take(sizes.rank_down * plan.features, precision.gemm);
  low_ = workspace.take(plan.rows * sizes.rank_down, precision.accumulate);
  if (precision.gemm != precision.accumulate)
    cast_ = workspace.take(plan.rows * sizes.rank_down, precision.gemm);
}

void DownAdapter::add_tile(
    const Tensor& hidden, int64_t feature0, bool first, const Tensor& product) const {
  if (!adapter_) return;
  const Tensor a = packed(adapter_.a->narrow(1, feature0, hidden.size(1)), a_tile_);
  add_product(matrix(low_, hidden.size(0), adapter_.rank()), hidden, a.t(), first, product);
}

void DownAdapter::finish(const Tensor& y, const Tensor& product) const {
  if (!adapter_) return;
  const Tensor low = matrix(low_, y.size(0), adapter_.rank());
  low.mul_(adapter_.scale);
  add_product(y, packed(low, cast_), b_.t(), /*first=*/false, product);
}

AdapterGradients::AdapterGradients(
    const MlpLayer& layer, const MlpSizes& sizes, const MlpPrecision& precision,
    const MlpGradientMask& wanted, bool wants_x, const TilePlan& plan,
    const MlpGradients& gradients, const RowFactors& factors, Workspace& workspace)
    : sizes_(sizes), plan_(plan), down_scale_(layer.down_adapter.scale) {
  const auto row_sums = [&](bool needed, int64_t rank) {
    if (!needed) return Tensor();
    if (!plan.by_features) return workspace.take(plan.rows * rank, precision.accumulate);
    return at::empty({sizes.rows * rank}, layer.w_up.options().dtype(precision.accumulate));
  };
  const auto sum = [&](MlpGradient which, int64_t axis) {
    if (!wanted[which]) return GradientSum();
    return GradientSum(
        gradients[which], axis, /*outer=*/false, plan.rows >= sizes.rows, /*width=*/0, precision,
        workspace);
  };
  const auto input = [&](const LowRank& adapter, const Tensor& a, int64_t column, MlpGradient da) {
    const auto db = static_cast<MlpGradient>(da + 1);
    const bool rows_wanted = adapter && (wants_x || wanted[da]);
    return Input{adapter.scale, column,    adapter.rank(), a, row_sums(rows_wanted, adapter.rank()),
                 sum(da, 0),    sum(db, 0)};
  };
  up_ = input(layer.up_adapter, factors.up_a, sizes.d_in, kDUpA);
  gate_ = input(layer.gate_adapter, factors.gate_a, sizes.d_in + sizes.rank_up, kDGateA);
  low_ = row_sums(wanted[kDDownB], sizes.rank_down);
  ddown_a_ = sum(kDDownA, 1);
  ddown_b_ = sum(kDDownB, 0);
  if (precision.gemm != precision.accumulate && sizes.adapted())
    cast_ = workspace.take(plan.rows * sizes.widest_rank(), precision.gemm);
}

Tensor AdapterGradients::rows_of(
    const Tensor& sums, int64_t row0, int64_t rows, int64_t rank) const {
  return plan_.by_features ? matrix(sums, sizes_.rows, rank).narrow(0, row0, rows)
                           : matrix(sums, rows, rank);
}

Tensor AdapterGradients::scaled(const Tensor& sums, double scale) const {
  return packed(Tensor(sums).mul_(scale), cast_);
}

void AdapterGradients::add_input(
    const Input& input, const Tile& tile, const Tensor& w, const Tensor& dpre,
    const Tensor& product) const {
  const auto columns = [&](const Tensor& of) { return of.narrow(1, input.column, input.rank); };
  if (input.db)
    add_product(
        input.db.tile(tile.feature0, dpre.size(1)), dpre.t(), columns(tile.x), tile.row0 == 0,
        product);
  if (input.dlow.defined())
    add_product(
        rows_of(input.dlow, tile.row0, dpre.size(0), input.rank), dpre, columns(w),
        tile.feature0 == 0, product);
}

void AdapterGradients::add_tile(const Tile& tile, const Tensor& product) const {
  if (up_.rank > 0) add_input(up_, tile, tile.weights.w_up, tile.made.dup, product);
  if (gate_.rank > 0) add_input(gate_, tile, *tile.weights.w_gate, tile.made.dgate, product);
  const Tensor& hidden = tile.made.hidden;
  if (ddown_a_)
    add_product(
        ddown_a_.tile(tile.feature0, hidden.size(1)),
        tile.dy.narrow(1, sizes_.d_out, sizes_.rank_down).t(), hidden, tile.row0 == 0, product);
  if (ddown_b_)
    add_product(
        rows_of(low_, tile.row0, hidden.size(0), sizes_.rank_down), hidden,
        tile.weights.w_down.narrow(0, sizes_.d_out, sizes_.rank_down).t(), tile.feature0 == 0,
        product);
}

void AdapterGradients::finish_rows(
    const Tensor& x, const Tensor& dy, int64_t row0, const Tensor& dx,
    const Tensor& product) const {
  const int64_t rows = x.size(0);
  for (const Input& input : {up_, gate_}) {
    if (!input.dlow.defined()) continue;
    const Tensor dlow = scaled(rows_of(input.dlow, row0, rows, input.rank), input.scale);
    if (input.da)
      add_product(
          input.da.tile(0, input.rank), dlow.t(), x.narrow(1, 0, sizes_.d_in), row0 == 0, product);
    if (dx.defined()) add_product(dx, dlow, input.a, /*first=*/false, product);
  }
  if (!ddown_b_) return;
  const Tensor low = scaled(rows_of(low_, row0, rows, sizes_.rank_down), down_scale_);
  add_product(
      ddown_b_.tile(0, sizes_.d_out), dy.narrow(1, 0, sizes_.d_out).t(), low, row0 == 0, product);
}

void AdapterGradients::finish() const {
  for (const GradientSum& sum : {up_.da, up_.db, gate_.da, gate_.db, ddown_a_, ddown_b_})
    sum.finish();
}

}  // namespace fused_remat
