// Level 3 of the MLP in CUDA C++: library products and our kernels. Meaning: csrc/mlp.h.
//
// x, dy and weights may have any strides that ATen's products take; hidden, dup, dgate and
// residuals have dense rows.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "../backends.h"
#include "../mlp_ops.h"
#include "device.h"
#include "mlp_kernels.h"
#include "mlp_route.h"

namespace fused_remat::cuda {

using at::Tensor;

namespace {

MlpMatrix matrix_of(const char* name, const Tensor& t, const Tensor& hidden) {
  TORCH_CHECK_TYPE(
      t.scalar_type() == hidden.scalar_type(), "mlp: ", name, " must have the dtype of hidden, ",
      hidden.scalar_type(), "; got ", t.scalar_type());
  if (t.numel() == 0) return {};
  TORCH_CHECK_VALUE(
      t.dim() == 2 && (t.stride(1) == 1 || t.size(1) == 1), "mlp: ", name,
      " must be a matrix with dense rows; got strides ", t.strides());
  return {t.mutable_data_ptr(), t.stride(0), t.size(1)};
}

// values <- x w^T for the features that are not kept, with the bias where the product takes it.
MlpPre rebuild(
    const Tensor& x, const Tensor& w, const OptionalTensor& bias, const Tensor& kept,
    bool read_kept, const Tensor& values) {
  MlpPre pre{matrix_of("a buffer", values, values), matrix_of("a residual", kept, values)};
  const int64_t n_kept = read_kept ? kept.size(1) : 0, n = w.size(0) - n_kept;
  if (n == 0) return pre;
  Tensor out = values.narrow(1, n_kept, n);
  const Tensor weight = w.narrow(0, n_kept, n).t();
  if (bias && bias->scalar_type() == values.scalar_type()) {
    at::addmm_out(out, bias->narrow(0, n_kept, n), x, weight);
    return pre;
  }
  at::mm_out(out, x, weight);
  if (bias) {
    TORCH_CHECK_VALUE(bias->is_contiguous(), "mlp: biases must be contiguous");
    pre.bias = bias->const_data_ptr();
    pre.bias_dtype = dtype_of(*bias);
  }
  return pre;
}

MlpTileArgs tile_args(
    const MlpTile& tile, const MlpPre& up, const MlpPre& gate, const Tensor& hidden) {
  return {hidden.size(0), hidden.size(1),   activation_of(tile.activation),     up,
          gate,           dropout_of(tile), matrix_of("hidden", hidden, hidden)};
}

// hidden alone: forward, which stores residuals, and backward where nothing flows through the
// activation, which reads them.
void make_hidden(
    const Tensor& x, const MlpLayer& layer, const MlpTile& tile, const MlpResiduals& residuals,
    const Tensor& hidden, const Tensor& gate_buffer, bool store_kept) {
  const OnDevice on(hidden);
  const LtProduct product = lt_hidden(x, layer, hidden);
  if (why_not_lt_hidden(layer, tile, residuals, product) == nullptr)
    return lt_multiply(product, epilogue_of_hidden(product), on.stream());
  const MlpPre up = rebuild(x, layer.w_up, layer.b_up, residuals.up, !store_kept, hidden);
  MlpPre gate;
  if (layer.gated())
    gate = rebuild(x, *layer.w_gate, layer.b_gate, residuals.gate, !store_kept, gate_buffer);
  mlp_act({tile_args(tile, up, gate, hidden), store_kept}, dtype_of(hidden), on.stream());
}

void add_column_sums(const Tensor& a, const Tensor& out) {
  if (out.numel() > 0) level3<ColumnSums>("column_sums", "cuda").call(a, out);
}

// Sums of the gradients as they are stored.
void add_bias_gradients(const MlpBuffers& buffers, const Tensor& db_up, const Tensor& db_gate) {
  add_column_sums(buffers.dup, db_up);
  add_column_sums(buffers.dgate, db_gate);
}

void by_library_epilogues(const MlpBackwardCall& call, Stream stream) {
  const Tensor aux = aux_of(call);
  const LtProduct hidden = lt_hidden(call.x, call.layer, call.buffers.hidden, aux);
  lt_multiply(hidden, epilogue_of_hidden(hidden), stream);
  lt_multiply(lt_gradient(call, aux), LtEpilogue::kGeluGradient, stream);
}

// `buffer` <- pre-activations, bias included, unless they were kept whole.
void rebuild_whole(
    const Tensor& x, const Tensor& w, const OptionalTensor& bias, const Tensor& kept,
    const Tensor& buffer) {
  const int64_t n_kept = kept.size(1), n = buffer.size(1) - n_kept;
  if (n == 0) return;
  const MlpPre pre = rebuild(x, w, bias, kept, /*read_kept=*/true, buffer);
  if (pre.bias != nullptr) buffer.narrow(1, n_kept, n).add_(bias->narrow(0, n_kept, n));
  if (n_kept > 0) buffer.narrow(1, 0, n_kept).copy_(kept);
}

void by_cutlass(const MlpBackwardCall& call, int capability, Stream stream) {
  const MlpLayer& layer = call.layer;
  const MlpBuffers& buffers = call.buffers;
  rebuild_whole(call.x, layer.w_up, layer.b_up, call.residuals.up, buffers.dup);
  if (layer.gated())
    rebuild_whole(call.x, *layer.w_gate, layer.b_gate, call.residuals.gate, buffers.dgate);
  switch (stage1_kernel(capability)) {
#if defined(FUSED_REMAT_WITH_CUTLASS_SM80)
    case Stage1Kernel::kSm80:
      return cutlass_stage1_sm80(stage1_gemm(call), stream);
#endif
#if defined(FUSED_REMAT_WITH_CUTLASS_SM90A)
    case Stage1Kernel::kSm90a:
      return cutlass_stage1_sm90a(stage1_gemm(call), stream);
#endif
    default:
      TORCH_INTERNAL_ASSERT(false, "no stage 1 kernel for capability ", capability);
  }
}

void by_elementwise_kernel(
    const MlpBackwardCall& call, const Tensor& db_up, const Tensor& db_gate, Stream stream) {
  const MlpLayer& layer = call.layer;
  const MlpBuffers& buffers = call.buffers;
  Tensor dhidden = buffers.hidden;
  at::mm_out(dhidden, call.dy, layer.w_down);
  const MlpPre up =
      rebuild(call.x, layer.w_up, layer.b_up, call.residuals.up, /*read_kept=*/true, buffers.dup);
  MlpPre gate;
  if (layer.gated())
    gate = rebuild(
        call.x, *layer.w_gate, layer.b_gate, call.residuals.gate, /*read_kept=*/true,
        buffers.dgate);

  ChunkScratch scratch(buffers.scratch);
  const int64_t blocks = (dhidden.size(0) + kMlpSumRows - 1) / kMlpSumRows;
  const auto partial_of = [&](const Tensor& sums) {
    if (sums.numel() == 0) return Tensor();
    const Tensor partial = scratch.take(blocks, sums.size(0), sums.scalar_type());
    return partial.defined() ? partial : at::empty({blocks, sums.size(0)}, sums.options());
  };
  const Tensor partial_up = partial_of(db_up), partial_gate = partial_of(db_gate);
  const auto data = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
  mlp_dact(
      {tile_args(call.tile, up, gate, buffers.hidden), matrix_of("hidden", dhidden, dhidden),
       matrix_of("dup", buffers.dup, dhidden), matrix_of("dgate", buffers.dgate, dhidden),
       data(partial_up), data(partial_gate)},
      dtype_of(dhidden), stream);
  if (partial_up.defined()) add_column_sums(partial_up, db_up);
  if (partial_gate.defined()) add_column_sums(partial_gate, db_gate);
}

void check_sums(const char* name, const Tensor& sums, const Tensor& hidden) {
  const at::ScalarType wide = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_TYPE(
      sums.numel() == 0 || sums.scalar_type() == wide, "mlp: ", name, " must be ", wide, " for ",
      hidden.scalar_type(), "; got ", sums.scalar_type());
}

void mlp_fwd_chunk(
    const Tensor& x, const MlpLayer& layer, const MlpTile& tile, const MlpResiduals& residuals,
    const MlpBuffers& buffers) {
  if (buffers.hidden.numel() == 0) return;
  make_hidden(x, layer, tile, residuals, buffers.hidden, buffers.scratch, /*store_kept=*/true);
}

void mlp_bwd_chunk(
    const Tensor& x, const Tensor& dy, const MlpLayer& layer, const MlpTile& tile,
    const MlpResiduals& residuals, const MlpBuffers& buffers, const Tensor& db_up,
    const Tensor& db_gate) {
  if (buffers.hidden.numel() == 0) return;
  if (buffers.dup.numel() == 0)
    return make_hidden(
        x, layer, tile, residuals, buffers.hidden, buffers.dgate, /*store_kept=*/false);
  check_sums("db_up", db_up, buffers.hidden);
  check_sums("db_gate", db_gate, buffers.hidden);
  const OnDevice on(buffers.hidden);
  const MlpBackwardCall call{x, dy, layer, tile, residuals, buffers};
  switch (mlp_route(call, on.capability()).route) {
    case MlpRoute::kLibraryEpilogues:
      by_library_epilogues(call, on.stream());
      return add_bias_gradients(buffers, db_up, db_gate);
    case MlpRoute::kCutlass:
      by_cutlass(call, on.capability(), on.stream());
      return add_bias_gradients(buffers, db_up, db_gate);
    case MlpRoute::kElementwise:
      return by_elementwise_kernel(call, db_up, db_gate, on.stream());
  }
}

// The way that mlp_bwd_chunk_cuda goes with these arguments, then why it goes none of those before.
std::vector<std::string> mlp_route_op(
    const Tensor& x, const Tensor& dy, const Tensor& w_up, const Tensor& w_down,
    const OptionalTensor& b_up, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    const Tensor& up, const Tensor& gate, const Tensor& seed, std::string activation,
    double dropout_p, const Tensor& hidden, const Tensor& dup, const Tensor& dgate,
    const Tensor& scratch) {
  const MlpLayer layer{w_up, w_down, b_up, std::nullopt, w_gate, b_gate};
  const MlpTile tile{seed, activation, dropout_p, 0, 0, hidden.size(1)};
  const MlpResiduals residuals{up, gate};
  const MlpBuffers buffers{hidden, dup, dgate, scratch};
  const OnDevice on(hidden);
  MlpRouteChoice choice = mlp_route({x, dy, layer, tile, residuals, buffers}, on.capability());
  choice.refused.insert(choice.refused.begin(), name_of(choice.route));
  return choice.refused;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_remat, m) {
  if (is_defined("fused_remat::mlp_route_cuda")) return;
  m.def(
      "mlp_route_cuda(Tensor x, Tensor dy, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? "
      "w_gate, Tensor? b_gate, Tensor up, Tensor gate, Tensor seed, str activation, float "
      "dropout_p, Tensor hidden, Tensor dup, Tensor dgate, Tensor scratch) -> str[]");
}

TORCH_LIBRARY_IMPL(fused_remat, FUSED_REMAT_CUDA_KEY, m) {
  m.impl("mlp_fwd_chunk_cuda", mlp_fwd_chunk_op<mlp_fwd_chunk>);
  m.impl("mlp_route_cuda", mlp_route_op);
  m.impl("mlp_bwd_chunk_cuda", mlp_bwd_chunk_op<mlp_bwd_chunk>);
}

}  // namespace fused_remat::cuda
