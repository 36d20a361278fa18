// Level 3 composed from ATen: any device and dtype, inside the workspace, never absent.
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "../mlp.h"
#include "activations.h"

namespace fused_remat::aten {

using at::Tensor;

namespace {

// Rows of a tile whose dropout mask is made at a time: its int64 temporaries must stay a fraction
// of the tile.
int64_t mask_slab_rows(int64_t rows) { return std::max<int64_t>(1, rows / 16); }

void drop_(const Tensor& values, const MlpTile& tile) {
  if (tile.dropout_p == 0.0) return;
  const int64_t rows = values.size(0), slab = mask_slab_rows(rows);
  for (int64_t row = 0; row < rows; row += slab) {
    Tensor part = values.narrow(0, row, std::min(slab, rows - row));
    part.mul_(dropout_scales(
        tile.seed, tile.dropout_p, tile.row0 + row, part.size(0), tile.feature0, part.size(1),
        tile.hidden_features, part.options()));
  }
}

// pre <- the kept columns, and x w^T + b for the others.
void rebuild_pre(
    const Tensor& x, const Tensor& w, const OptionalTensor& bias, const Tensor& kept,
    const Tensor& pre) {
  const int64_t n_kept = kept.size(1), n = pre.size(1) - n_kept;
  if (n_kept > 0) pre.narrow(1, 0, n_kept).copy_(kept);
  if (n == 0) return;
  Tensor rebuilt = pre.narrow(1, n_kept, n);
  at::mm_out(rebuilt, x, w.narrow(0, n_kept, n).t());
  if (bias) rebuilt.add_(bias->narrow(0, n_kept, n));
}

void keep(const Tensor& pre, const Tensor& kept) {
  Tensor out = kept;
  if (out.size(1) > 0) out.copy_(pre.narrow(1, 0, out.size(1)));
}

Tensor none_kept(const Tensor& kept) { return kept.narrow(1, 0, 0); }

}  // namespace

void mlp_fwd_chunk(
    const Tensor& x, const MlpLayer& layer, const MlpTile& tile, const MlpResiduals& residuals,
    const MlpBuffers& buffers) {
  const Activation& act = activation(tile.activation);
  Tensor hidden = buffers.hidden;
  rebuild_pre(x, layer.w_up, layer.b_up, none_kept(residuals.up), hidden);
  keep(hidden, residuals.up);
  if (layer.gated()) {
    rebuild_pre(x, *layer.w_gate, layer.b_gate, none_kept(residuals.gate), buffers.scratch);
    keep(buffers.scratch, residuals.gate);
    act.value(buffers.scratch, buffers.scratch);
    hidden.mul_(buffers.scratch);
  } else {
    act.value(hidden, hidden);
  }
  drop_(hidden, tile);
}

void mlp_bwd_chunk(
    const Tensor& x, const Tensor& dy, const MlpLayer& layer, const MlpTile& tile,
    const MlpResiduals& residuals, const MlpBuffers& buffers, const Tensor& db_up,
    const Tensor& db_gate) {
  const Activation& act = activation(tile.activation);
  const bool with_gradient = buffers.dup.numel() > 0, gated = layer.gated();
  Tensor hidden = buffers.hidden, dup = buffers.dup, dgate = buffers.dgate;
  // A plain layer rebuilds `up` in scratch, a gated one in hidden and `gate` in dgate; each becomes
  // its gradient there.
  const Tensor& pre = gated ? dgate : buffers.scratch;
  const Tensor& value = gated ? buffers.scratch : hidden;
  rebuild_pre(x, layer.w_up, layer.b_up, residuals.up, gated ? hidden : pre);
  if (gated) rebuild_pre(x, *layer.w_gate, layer.b_gate, residuals.gate, pre);
  act.value(pre, value);
  if (with_gradient) {
    at::mm_out(dup, dy, layer.w_down);
    drop_(dup, tile);
    act.gradient(pre, value, dup, gated ? dgate : dup);
    if (gated) {
      dgate.mul_(hidden);
      dup.mul_(value);
    }
    if (db_up.numel() > 0) column_sums(dup, db_up);
    if (db_gate.numel() > 0) column_sums(dgate, db_gate);
  }
  if (gated) hidden.mul_(value);
  drop_(hidden, tile);
}

void column_sums(const Tensor& a, const Tensor& out) {
  Tensor sum = out;
  sum.add_(at::sum(a, {0}, /*keepdim=*/false, out.scalar_type()));
}

}  // namespace fused_remat::aten
