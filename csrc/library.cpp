// Every schema of the library in one place, and which function implements it.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "activations.h"
#include "mlp.h"
#include "mlp_calls.h"
#include "stream/plan.h"

namespace fused_remat {
namespace {

using at::ScalarType;
using at::Tensor;
using std::string;

// The registered signatures are flat; these adapters group their arguments. The same types serve
// the calls below.
using MlpOp = Tensor(
    const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, string, double, int64_t, int64_t, int64_t, string,
    std::optional<ScalarType>);

template <auto kImplementation>
Tensor mlp_op(
    const Tensor& x, const Tensor& w_up, const Tensor& w_down, const OptionalTensor& b_up,
    const OptionalTensor& b_down, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    string activation, double dropout_p, int64_t keep_up, int64_t keep_gate, int64_t workspace,
    string backend, std::optional<ScalarType> compute_dtype) {
  return kImplementation(
      x, {w_up, w_down, b_up, b_down, w_gate, b_gate},
      {activation, dropout_p, workspace, backend, compute_dtype.value_or(x.scalar_type())},
      {keep_up, keep_gate});
}

// Casts nothing: x and the fp32 parameters are what is kept, and chunks are cast inside. fp64 stays
// out of autocast, as everywhere in torch.
template <at::DeviceType kDevice>
Tensor mlp_autocast(
    const Tensor& x, const Tensor& w_up, const Tensor& w_down, const OptionalTensor& b_up,
    const OptionalTensor& b_down, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    string activation, double dropout_p, int64_t keep_up, int64_t keep_gate, int64_t workspace,
    string backend, std::optional<ScalarType> compute_dtype) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  if (!compute_dtype && x.scalar_type() != at::kDouble)
    compute_dtype = at::autocast::get_autocast_dtype(kDevice);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fused_remat::mlp", "").typed<MlpOp>();
  return op.call(
      x, w_up, w_down, b_up, b_down, w_gate, b_gate, activation, dropout_p, keep_up, keep_gate,
      workspace, backend, compute_dtype);
}

std::tuple<Tensor, Tensor, Tensor> mlp_fwd_op(
    const Tensor& x, const Tensor& w_up, const Tensor& w_down, const OptionalTensor& b_up,
    const OptionalTensor& b_down, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    const Tensor& seed, string activation, double dropout_p, int64_t keep_up, int64_t keep_gate,
    int64_t workspace, ScalarType compute_dtype, string backend) {
  auto [y, up, gate] = mlp_fwd(
      x, {w_up, w_down, b_up, b_down, w_gate, b_gate}, seed,
      {activation, dropout_p, workspace, backend, compute_dtype}, {keep_up, keep_gate});
  return {y, up, gate};
}

using MlpGradientTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
MlpGradientTuple mlp_bwd_op(
    const Tensor& dy, const Tensor& x, const Tensor& w_up, const Tensor& w_down,
    const OptionalTensor& b_up, const OptionalTensor& b_down, const OptionalTensor& w_gate,
    const OptionalTensor& b_gate, const Tensor& up, const Tensor& gate, const Tensor& seed,
    string activation, double dropout_p, int64_t workspace, ScalarType compute_dtype,
    string backend, MlpGradientMask output_mask) {
  return std::tuple_cat(mlp_bwd(
      dy, x, {w_up, w_down, b_up, b_down, w_gate, b_gate}, up, gate, seed,
      {activation, dropout_p, workspace, backend, compute_dtype}, output_mask));
}

template <MlpForwardChunk kImplementation>
void mlp_fwd_chunk_op(
    const Tensor& x, const Tensor& w_up, const OptionalTensor& b_up, const OptionalTensor& w_gate,
    const OptionalTensor& b_gate, const Tensor& seed, string activation, double dropout_p,
    int64_t row0, int64_t feature0, int64_t hidden_features, const Tensor& up, const Tensor& gate,
    const Tensor& hidden, const Tensor& scratch) {
  kImplementation(
      x, {w_up, {}, b_up, std::nullopt, w_gate, b_gate},
      {seed, activation, dropout_p, row0, feature0, hidden_features}, {up, gate},
      {hidden, {}, {}, scratch});
}

template <MlpBackwardChunk kImplementation>
void mlp_bwd_chunk_op(
    const Tensor& x, const Tensor& dy, const Tensor& w_up, const Tensor& w_down,
    const OptionalTensor& b_up, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    const Tensor& up, const Tensor& gate, const Tensor& seed, string activation, double dropout_p,
    int64_t row0, int64_t feature0, int64_t hidden_features, const Tensor& hidden,
    const Tensor& dup, const Tensor& dgate, const Tensor& scratch, const Tensor& db_up,
    const Tensor& db_gate) {
  kImplementation(
      x, dy, {w_up, w_down, b_up, std::nullopt, w_gate, b_gate},
      {seed, activation, dropout_p, row0, feature0, hidden_features}, {up, gate},
      {hidden, dup, dgate, scratch}, db_up, db_gate);
}

std::vector<string> activation_names() {
#define FUSED_REMAT_NAME(name, Act) name,
  return {FUSED_REMAT_ACTIVATIONS(FUSED_REMAT_NAME)};
#undef FUSED_REMAT_NAME
}

template <class Signature>
auto level3(const char* op, const std::string& backend) {
  const string name = string("fused_remat::") + op + "_" + backend;
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Signature>();
}

}  // namespace

namespace calls {

MlpForward mlp_fwd(
    const Tensor& x, const MlpLayer& layer, const Tensor& seed, const MlpOptions& options,
    const MlpKeep& keep) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fused_remat::mlp_fwd", "")
                             .typed<decltype(mlp_fwd_op)>();
  auto [y, up, gate] = op.call(
      x, layer.w_up, layer.w_down, layer.b_up, layer.b_down, layer.w_gate, layer.b_gate, seed,
      options.activation, options.dropout_p, keep.up, keep.gate, options.workspace,
      options.compute_dtype, options.backend);
  return {y, up, gate};
}

MlpGradients mlp_bwd(
    const Tensor& dy, const Tensor& x, const MlpLayer& layer, const Tensor& up, const Tensor& gate,
    const Tensor& seed, const MlpOptions& options, const MlpGradientMask& output_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fused_remat::mlp_bwd", "")
                             .typed<decltype(mlp_bwd_op)>();
  return std::apply(
      [](auto&&... gradient) { return MlpGradients{gradient...}; },
      op.call(
          dy, x, layer.w_up, layer.w_down, layer.b_up, layer.b_down, layer.w_gate, layer.b_gate, up,
          gate, seed, options.activation, options.dropout_p, options.workspace,
          options.compute_dtype, options.backend, output_mask));
}

void mlp_fwd_chunk(
    const std::string& backend, const Tensor& x, const MlpLayer& layer, const MlpTile& tile,
    const MlpResiduals& residuals, const MlpBuffers& buffers) {
  level3<decltype(mlp_fwd_chunk_op<cpu::mlp_fwd_chunk>)>("mlp_fwd_chunk", backend)
      .call(
          x, layer.w_up, layer.b_up, layer.w_gate, layer.b_gate, tile.seed, tile.activation,
          tile.dropout_p, tile.row0, tile.feature0, tile.hidden_features, residuals.up,
          residuals.gate, buffers.hidden, buffers.scratch);
}

void mlp_bwd_chunk(
    const std::string& backend, const Tensor& x, const Tensor& dy, const MlpLayer& layer,
    const MlpTile& tile, const MlpResiduals& residuals, const MlpBuffers& buffers,
    const Tensor& db_up, const Tensor& db_gate) {
  level3<decltype(mlp_bwd_chunk_op<cpu::mlp_bwd_chunk>)>("mlp_bwd_chunk", backend)
      .call(
          x, dy, layer.w_up, layer.w_down, layer.b_up, layer.w_gate, layer.b_gate, residuals.up,
          residuals.gate, tile.seed, tile.activation, tile.dropout_p, tile.row0, tile.feature0,
          tile.hidden_features, buffers.hidden, buffers.dup, buffers.dgate, buffers.scratch, db_up,
          db_gate);
}

void column_sums(const std::string& backend, const Tensor& a, const Tensor& out) {
  level3<ColumnSums>("column_sums", backend).call(a, out);
}

}  // namespace calls

TORCH_LIBRARY(fused_remat, m) {
  m.def(
      "mlp(Tensor x, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? b_down, Tensor? w_gate, "
      "Tensor? b_gate,"
      " str activation, float dropout_p, int keep_up, int keep_gate, int workspace, str backend,"
      " ScalarType? compute_dtype=None) -> Tensor");
  m.def(
      "mlp_fwd(Tensor x, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? b_down, Tensor? w_gate, "
      "Tensor? b_gate,"
      " Tensor seed, str activation, float dropout_p, int keep_up, int keep_gate, int workspace,"
      " ScalarType compute_dtype, str backend) -> (Tensor y, Tensor up, Tensor gate)");
  m.def(
      "mlp_bwd(Tensor dy, Tensor x, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? b_down, "
      "Tensor? w_gate,"
      " Tensor? b_gate, Tensor up, Tensor gate, Tensor seed, str activation, float dropout_p, int "
      "workspace,"
      " ScalarType compute_dtype, str backend, bool[7] output_mask) -> (Tensor dx, Tensor dw_up, "
      "Tensor dw_down,"
      " Tensor db_up, Tensor db_down, Tensor dw_gate, Tensor db_gate)");
  // [axis (0 tokens, 1 features), rows, features, bytes] of the tiles that the streaming would use:
  // what explain prints.
  m.def(
      "mlp_plan(int rows, int d_in, int d_out, int hidden_features, bool gated, bool backward, "
      "bool dropout,"
      " ScalarType x_dtype, ScalarType weight_dtype, ScalarType compute_dtype, int workspace, str "
      "backend,"
      " str device) -> int[]");
  for (const string suffix : {"aten", "cpp"}) {
    m.def(("mlp_fwd_chunk_" + suffix +
           "(Tensor x, Tensor w_up, Tensor? b_up, Tensor? w_gate, Tensor? b_gate, Tensor seed, str "
           "activation,"
           " float dropout_p, int row0, int feature0, int hidden_features, Tensor(a!) up, "
           "Tensor(b!) gate,"
           " Tensor(c!) hidden, Tensor(d!) scratch) -> ()")
              .c_str());
    m.def(("mlp_bwd_chunk_" + suffix +
           "(Tensor x, Tensor dy, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? w_gate, "
           "Tensor? b_gate, Tensor up,"
           " Tensor gate, Tensor seed, str activation, float dropout_p, int row0, int feature0, "
           "int hidden_features,"
           " Tensor(a!) hidden, Tensor(b!) dup, Tensor(c!) dgate, Tensor(d!) scratch, Tensor(e!) "
           "db_up,"
           " Tensor(f!) db_gate) -> ()")
              .c_str());
    m.def(("column_sums_" + suffix + "(Tensor a, Tensor(a!) out) -> ()").c_str());
  }
  // The names that every compiled backend knows.
  m.def("activations() -> str[]");
  m.impl("mlp_plan", mlp_plan);
  m.impl("activations", activation_names);
}

TORCH_LIBRARY_IMPL(fused_remat, CompositeExplicitAutograd, m) {
  m.impl("mlp", mlp_op<mlp_without_grad>);
  m.impl("mlp_fwd", mlp_fwd_op);
  m.impl("mlp_bwd", mlp_bwd_op);
  m.impl("mlp_fwd_chunk_aten", mlp_fwd_chunk_op<aten::mlp_fwd_chunk>);
  m.impl("mlp_bwd_chunk_aten", mlp_bwd_chunk_op<aten::mlp_bwd_chunk>);
  m.impl("column_sums_aten", aten::column_sums);
}

TORCH_LIBRARY_IMPL(fused_remat, CPU, m) {
  m.impl("mlp_fwd_chunk_cpp", mlp_fwd_chunk_op<cpu::mlp_fwd_chunk>);
  m.impl("mlp_bwd_chunk_cpp", mlp_bwd_chunk_op<cpu::mlp_bwd_chunk>);
  m.impl("column_sums_cpp", cpu::column_sums);
}

TORCH_LIBRARY_IMPL(fused_remat, Autograd, m) {
  m.impl("mlp", mlp_op<mlp_autograd>);
  // Only `mlp` is differentiable; differentiating an inner op is an error, never zeros.
  for (const char* op :
       {"mlp_fwd", "mlp_bwd", "mlp_fwd_chunk_aten", "mlp_bwd_chunk_aten", "column_sums_aten",
        "mlp_fwd_chunk_cpp", "mlp_bwd_chunk_cpp", "column_sums_cpp"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(fused_remat, AutocastCPU, m) { m.impl("mlp", mlp_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(fused_remat, AutocastCUDA, m) { m.impl("mlp", mlp_autocast<at::kCUDA>); }

}  // namespace fused_remat
