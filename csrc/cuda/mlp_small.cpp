// The level-3 ops of narrow MLPs: one kernel forward, one backward.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../philox.h"
#include "device.h"
#include "mlp_small.h"
#include "mlp_small_kernels.h"

namespace fused_remat::cuda {
namespace {

using at::Tensor;
using std::string;
using OptionalTensor = std::optional<Tensor>;

// A matrix of that shape, or a vector as one row; absent where the tensor is. `name` is that of the
// argument.
SmallMatrix matrix_of(
    const char* name, const OptionalTensor& t, at::IntArrayRef shape, const Tensor& x) {
  if (!t) return {};
  TORCH_CHECK_VALUE(
      t->sizes() == shape, "mlp_small: ", name, " must be ", shape, "; got ", t->sizes());
  TORCH_CHECK_VALUE(
      t->device() == x.device(), "mlp_small: ", name, " must be on ", x.device(), "; got ",
      t->device());
  const Dtype dtype = dtype_of(*t);
  TORCH_CHECK_TYPE(
      dtype != Dtype::kDouble, "mlp_small: ", name, " must be float32, float16 or bfloat16; got ",
      t->scalar_type());
  SmallMatrix made;
  made.data = const_cast<void*>(t->const_data_ptr());
  made.rows = t->dim() == 2 ? t->size(0) : 1;
  made.cols = t->size(-1);
  made.row_stride = t->dim() == 2 ? t->stride(0) : made.cols;
  made.col_stride = t->stride(-1);
  made.dtype = dtype;
  return made;
}

struct Sizes {
  int64_t rows, d_in, d_out, features;
};

// Raises where the kernels do not take the call; the level above asks before it comes here.
Sizes check_sizes(
    const Tensor& x, const Tensor& w_up, const Tensor& w_down, at::ScalarType compute) {
  TORCH_CHECK_VALUE(
      x.dim() == 2 && w_up.dim() == 2 && w_down.dim() == 2,
      "mlp_small: x [M, D], w_up [F, D] and w_down [D_out, F] must be matrices");
  const Sizes sizes{x.size(0), x.size(1), w_down.size(0), w_up.size(0)};
  const auto reasons = mlp_small::why_not(
      {sizes.rows, sizes.d_in, sizes.d_out, sizes.features, compute, {}, false, false, false});
  TORCH_CHECK_VALUE(reasons.empty(), "mlp_small: ", reasons[0]);
  return sizes;
}

SmallLayer layer_of(
    const Tensor& x, const Sizes& sizes, const Tensor& w_up, const Tensor& w_down,
    const OptionalTensor& b_up, const OptionalTensor& b_down, const OptionalTensor& w_gate,
    const OptionalTensor& b_gate) {
  SmallLayer layer;
  layer.w_up = matrix_of("w_up", w_up, {sizes.features, sizes.d_in}, x);
  layer.w_gate = matrix_of("w_gate", w_gate, {sizes.features, sizes.d_in}, x);
  layer.w_down = matrix_of("w_down", w_down, {sizes.d_out, sizes.features}, x);
  layer.b_up = matrix_of("b_up", b_up, {sizes.features}, x);
  layer.b_gate = matrix_of("b_gate", b_gate, {sizes.features}, x);
  layer.b_down = matrix_of("b_down", b_down, {sizes.d_out}, x);
  return layer;
}

SmallOptions options_of(
    const Tensor& seed, const string& activation, double dropout_p, at::ScalarType compute) {
  SmallOptions options{
      compute == at::kHalf ? Dtype::kHalf : Dtype::kBFloat16, activation_of(activation)};
  if (dropout_p == 0.0) return options;
  TORCH_CHECK_VALUE(
      dropout_p > 0.0 && dropout_p < 1.0, "mlp_small: dropout_p must be in [0, 1); got ",
      dropout_p);
  TORCH_CHECK_VALUE(
      seed.numel() == 1 && seed.scalar_type() == at::kLong,
      "mlp_small: dropout needs an int64 seed of 1 element; got ", seed.numel(), " elements of ",
      seed.scalar_type());
  options.seed = seed.const_data_ptr<int64_t>();
  options.threshold = philox::drop_threshold(dropout_p);
  options.scale = static_cast<float>(1.0 / (1.0 - dropout_p));
  return options;
}

void mlp_small_fwd_op(
    const Tensor& x, const Tensor& w_up, const Tensor& w_down, const OptionalTensor& b_up,
    const OptionalTensor& b_down, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    const Tensor& seed, string activation, double dropout_p, const Tensor& y) {
  const Sizes sizes = check_sizes(x, w_up, w_down, y.scalar_type());
  SmallForward call;
  call.x = matrix_of("x", x, {sizes.rows, sizes.d_in}, x);
  call.y = matrix_of("y", y, {sizes.rows, sizes.d_out}, x);
  call.layer = layer_of(x, sizes, w_up, w_down, b_up, b_down, w_gate, b_gate);
  call.options = options_of(seed, activation, dropout_p, y.scalar_type());
  const OnDevice on(x);
  mlp_small_forward(call, on.stream());
}

void mlp_small_bwd_op(
    const Tensor& dy, const Tensor& x, const Tensor& w_up, const Tensor& w_down,
    const OptionalTensor& b_up, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    const Tensor& seed, string activation, double dropout_p, at::ScalarType compute,
    int64_t workspace, const OptionalTensor& dx, const OptionalTensor& dw_up,
    const OptionalTensor& dw_down, const OptionalTensor& db_up, const OptionalTensor& db_down,
    const OptionalTensor& dw_gate, const OptionalTensor& db_gate) {
  const Sizes sizes = check_sizes(x, w_up, w_down, compute);
  SmallBackward call;
  call.dy = matrix_of("dy", dy, {sizes.rows, sizes.d_out}, x);
  call.x = matrix_of("x", x, {sizes.rows, sizes.d_in}, x);
  call.layer = layer_of(x, sizes, w_up, w_down, b_up, std::nullopt, w_gate, b_gate);
  call.options = options_of(seed, activation, dropout_p, compute);
  call.dx = matrix_of("dx", dx, {sizes.rows, sizes.d_in}, x);
  call.dw_up = matrix_of("dw_up", dw_up, {sizes.features, sizes.d_in}, x);
  call.dw_gate = matrix_of("dw_gate", dw_gate, {sizes.features, sizes.d_in}, x);
  call.dw_down = matrix_of("dw_down", dw_down, {sizes.d_out, sizes.features}, x);
  call.db_up = matrix_of("db_up", db_up, {sizes.features}, x);
  call.db_gate = matrix_of("db_gate", db_gate, {sizes.features}, x);
  call.db_down = matrix_of("db_down", db_down, {sizes.d_out}, x);
  TORCH_CHECK_VALUE(
      w_gate || !(dw_gate || db_gate),
      "mlp_small: dw_gate and db_gate are of gated layers; w_gate was not given");
  const auto ranges = mlp_small::plan_ranges(
      sizes.rows, sizes.d_in, sizes.d_out, sizes.features, w_gate.has_value(), workspace);
  call.rows_per_range = ranges.rows;
  call.ranges = ranges.ranges;
  call.slices = ranges.slices;
  const OnDevice on(x);
  Tensor partial, arrived;
  if (ranges.ranges > 1 && (dw_up || dw_gate || dw_down || db_up || db_gate || db_down)) {
    arrived = at::zeros({ranges.slices}, x.options().dtype(at::kInt));
    partial = at::empty({ranges.partial_bytes() / 4}, x.options().dtype(at::kFloat));
    call.arrived = reinterpret_cast<uint32_t*>(arrived.mutable_data_ptr<int32_t>());
    call.partial = partial.mutable_data_ptr<float>();
  }
  (compute == at::kHalf ? mlp_small_backward_half : mlp_small_backward_bfloat16)(call, on.stream());
}

}  // namespace

TORCH_LIBRARY_IMPL(fused_remat, FUSED_REMAT_CUDA_KEY, m) {
  m.impl("mlp_small_fwd_cuda", mlp_small_fwd_op);
  m.impl("mlp_small_bwd_cuda", mlp_small_bwd_op);
}

}  // namespace fused_remat::cuda
