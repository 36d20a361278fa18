#include "tiles.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <string>

#include "../sizes.h"

namespace fused_remat {

using at::Tensor;

Workspace::Workspace(int64_t bytes, at::Device device)
    : bytes_(at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device))) {}

Tensor Workspace::take(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  TORCH_INTERNAL_ASSERT(used_ + bytes <= bytes_.numel(), "workspace plan too small");
  Tensor piece = bytes_.narrow(0, used_, bytes).view(dtype);
  used_ += round_up(bytes, kWorkspaceAlignment);
  return piece;
}

Tensor matrix(const Tensor& flat, int64_t rows, int64_t cols) {
  return flat.narrow(0, 0, rows * cols).view({rows, cols});
}

int64_t row_count(const Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
}

Tensor as_rows(const Tensor& x) { return x.reshape({row_count(x), x.size(-1)}); }

bool has_dense_rows(const Tensor& m) {
  return (m.stride(1) == 1 || m.size(1) == 1) && m.stride(0) >= std::max<int64_t>(1, m.size(1));
}

bool is_dense_weight(const Tensor& weight) {
  return has_dense_rows(weight) || has_dense_rows(weight.t());
}

Tensor packed(const Tensor& tile, const Tensor& flat) {
  if (!flat.defined()) return tile;
  Tensor copy = matrix(flat, tile.size(0), tile.size(1));
  copy.copy_(tile);
  return copy;
}

Tensor ready_rows(
    const std::string& backend, const Tensor& rows, const Norm& norm, const MlpPrecision& precision,
    const Tensor& flat) {
  if (!norm) return packed(rows, flat);
  Tensor ready = matrix(flat, rows.size(0), rows.size(1));
  calls::normalize_rows(backend, rows, norm, precision.compute, ready);
  return ready;
}

Tensor residual_tile(
    const Tensor& residual, int64_t row0, int64_t rows, int64_t feature0, int64_t features) {
  const int64_t kept = std::clamp<int64_t>(residual.size(1) - feature0, 0, features);
  if (kept == 0) return at::empty({rows, 0}, residual.options());
  return residual.narrow(0, row0, rows).narrow(1, feature0, kept);
}

WeightTiles::WeightTiles(
    const MlpLayer& layer, const MlpSizes& sizes, const MlpPacking& packing, bool down_rows,
    int64_t features, at::ScalarType gemm, Workspace& workspace)
    : layer_(layer), sizes_(sizes), down_rows_(down_rows && sizes.rank_down > 0) {
  if (packing.weights_in) {
    w_up_ = workspace.take(features * sizes.x_stride(), gemm);
    if (sizes.gated) w_gate_ = workspace.take(features * sizes.x_stride(), gemm);
  }
  if (packing.w_down)
    w_down_ = workspace.take(features * (sizes.d_out + (down_rows_ ? sizes.rank_down : 0)), gemm);
}

const MlpLayer& WeightTiles::tile(int64_t feature0, int64_t features) {
  if (feature0 == feature0_ && features == features_) return tile_;
  feature0_ = feature0;
  features_ = features;
  const auto bias = [&](const OptionalTensor& b) -> OptionalTensor {
    return b ? OptionalTensor(b->narrow(0, feature0, features).contiguous()) : std::nullopt;
  };
  tile_.w_up = tile_in(layer_.w_up, layer_.up_adapter, 0, w_up_);
  tile_.w_down = tile_down();
  if (layer_.gated())
    tile_.w_gate = tile_in(*layer_.w_gate, layer_.gate_adapter, sizes_.rank_up, w_gate_);
  tile_.b_up = bias(layer_.b_up);
  tile_.b_gate = bias(layer_.b_gate);
  return tile_;
}

Tensor WeightTiles::tile_in(
    const Tensor& w, const LowRank& adapter, int64_t column, const Tensor& flat) const {
  const Tensor tile = w.narrow(0, feature0_, features_);
  if (sizes_.ranks_in() == 0) return packed(tile, flat);
  const Tensor wide =
      matrix(flat, features_, sizes_.x_stride()).narrow(1, 0, sizes_.d_in + sizes_.ranks_in());
  wide.narrow(1, 0, sizes_.d_in).copy_(tile);
  const Tensor columns = wide.narrow(1, sizes_.d_in, sizes_.ranks_in());
  if (adapter.rank() < sizes_.ranks_in()) columns.zero_();
  if (adapter)
    columns.narrow(1, column, adapter.rank()).copy_(adapter.b->narrow(0, feature0_, features_));
  return wide;
}

Tensor WeightTiles::tile_down() const {
  const Tensor tile = layer_.w_down.narrow(1, feature0_, features_);
  if (!down_rows_) return packed(tile, w_down_);
  const Tensor tall = matrix(w_down_, sizes_.d_out + sizes_.rank_down, features_);
  tall.narrow(0, 0, sizes_.d_out).copy_(tile);
  tall.narrow(0, sizes_.d_out, sizes_.rank_down)
      .copy_(layer_.down_adapter.a->narrow(1, feature0_, features_));
  return tall;
}

// What torch says, before it launches anything, where tunable products are switched on and on GPUs
// without bfloat16.
static bool is_refusal(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.find("Tunable GEMM") != std::string::npos ||
         text.find("output type float") != std::string::npos;
}

// Half operands, fp32 sums, nothing rounded in between: the library products of CUDA alone have it.
// False where they do not.
static bool add_unrounded_product(Tensor& sum, const Tensor& a, const Tensor& b, bool first) {
  const at::Context& torch = at::globalContext();
  if (!sum.is_cuda() || torch.hasROCM() || sum.scalar_type() != at::kFloat) return false;
  if (a.scalar_type() == at::kHalf && torch.allowFP16AccumulationCuBLAS()) return false;
  try {
    first ? at::mm_out(sum, a, b, at::kFloat) : at::addmm_out(sum, sum, a, b, at::kFloat);
  } catch (const c10::Error& error) {
    if (!is_refusal(error)) throw;
    return false;
  }
  return true;
}

void add_product(
    const Tensor& out, const Tensor& a, const Tensor& b, bool first, const Tensor& flat_product) {
  Tensor sum = out;
  if (out.scalar_type() == a.scalar_type()) {
    first ? at::mm_out(sum, a, b) : at::addmm_out(sum, sum, a, b);
    return;
  }
  if (add_unrounded_product(sum, a, b, first)) return;
  Tensor product = matrix(flat_product, out.size(0), out.size(1));
  at::mm_out(product, a, b);
  first ? sum.copy_(product) : sum.add_(product);
}

MlpSizes mlp_sizes(const Tensor& x, const MlpLayer& layer) {
  return {
      row_count(x),  layer.w_up.size(1),      layer.w_down.size(0),      layer.w_up.size(0),
      layer.gated(), layer.up_adapter.rank(), layer.gate_adapter.rank(), layer.down_adapter.rank()};
}

bool dense_weights(const MlpLayer& layer, at::ScalarType gemm) {
  const auto fits = [&](const Tensor& w) { return w.scalar_type() == gemm && is_dense_weight(w); };
  return fits(layer.w_up) && fits(layer.w_down) && (!layer.gated() || fits(*layer.w_gate));
}

static void check_adapter(const LowRank& adapter, const char* name, int64_t out, int64_t in) {
  TORCH_CHECK_VALUE(
      adapter.a.has_value() == adapter.b.has_value(), "mlp: ", name, "_a and ", name,
      "_b go together");
  if (!adapter) return;
  TORCH_CHECK_VALUE(adapter.a->dim() == 2, "mlp: ", name, "_a must be [r, in]");
  const int64_t a[] = {adapter.rank(), in}, b[] = {out, adapter.rank()};
  TORCH_CHECK_VALUE(
      adapter.a->sizes() == at::IntArrayRef(a) && adapter.b->sizes() == at::IntArrayRef(b),
      "mlp: ", name, "_a and ", name, "_b must be [r, ", in, "] and [", out, ", r], got ",
      adapter.a->sizes(), " and ", adapter.b->sizes());
}

void check_mlp(
    const Tensor& x, const MlpLayer& layer, const Tensor& seed, const MlpOptions& options) {
  TORCH_CHECK_VALUE(x.dim() >= 1, "mlp: x must have at least 1 dim, got ", x.dim());
  TORCH_CHECK_VALUE(layer.w_up.dim() == 2, "mlp: w_up must be [F, D], got ", layer.w_up.sizes());
  TORCH_CHECK_VALUE(
      layer.w_down.dim() == 2, "mlp: w_down must be [D_out, F], got ", layer.w_down.sizes());
  const int64_t f = layer.w_up.size(0), d = layer.w_up.size(1);
  TORCH_CHECK_VALUE(
      x.size(-1) == d, "mlp: x has ", x.size(-1), " features, w_up [F, D] takes D = ", d);
  TORCH_CHECK_VALUE(
      layer.w_down.size(1) == f, "mlp: w_down has ", layer.w_down.size(1),
      " columns, expected F = ", f);
  if (layer.gated())
    TORCH_CHECK_VALUE(
        layer.w_gate->sizes() == layer.w_up.sizes(), "mlp: w_gate is ", layer.w_gate->sizes(),
        ", expected ", layer.w_up.sizes(), " like w_up");
  TORCH_CHECK_VALUE(
      options.dropout_p >= 0.0 && options.dropout_p < 1.0, "mlp: dropout_p must be in [0, 1), got ",
      options.dropout_p);
  TORCH_CHECK_VALUE(
      options.dropout_p == 0.0 || (seed.numel() == 1 && seed.scalar_type() == at::kLong),
      "mlp: dropout needs an int64 seed of 1 element, got ", seed.numel(), " elements of ",
      seed.scalar_type());
  const auto check_bias = [&](const OptionalTensor& b, const char* name, int64_t size) {
    TORCH_CHECK_VALUE(
        !b || (b->dim() == 1 && b->size(0) == size), "mlp: ", name, " must be [", size, "], got ",
        b ? b->sizes() : at::IntArrayRef{});
  };
  check_bias(layer.b_up, "b_up", f);
  check_bias(layer.b_gate, "b_gate", f);
  check_bias(layer.b_down, "b_down", layer.w_down.size(0));
  check_adapter(layer.up_adapter, "up", f, d);
  check_adapter(layer.gate_adapter, "gate", f, d);
  check_adapter(layer.down_adapter, "down", layer.w_down.size(0), f);
  TORCH_CHECK_VALUE(layer.gated() || !layer.gate_adapter, "mlp: gate_a was given without w_gate");
  check_bias(options.norm.weight, "norm_weight", d);
  check_bias(options.norm.bias, "norm_bias", d);
}

}  // namespace fused_remat
