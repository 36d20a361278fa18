// Every schema of the library in one place, and which function implements it.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "activations.h"
#include "autograd/remat.h"
#include "backends.h"
#include "mlp.h"
#include "mlp_calls.h"
#include "mlp_ops.h"
#include "stream/plan.h"

namespace fused_remat {
namespace {

using at::ScalarType;
using at::Tensor;
using std::string;

// The registered signatures are flat; these adapters group their arguments.
std::tuple<Tensor, Tensor, Tensor> mlp_fwd_op(
    const Tensor& x, const Tensor& w_up, const Tensor& w_down, const OptionalTensor& b_up,
    const OptionalTensor& b_down, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    const OptionalTensor& norm_weight, const OptionalTensor& norm_bias, const OptionalTensor& up_a,
    const OptionalTensor& up_b, const OptionalTensor& gate_a, const OptionalTensor& gate_b,
    const OptionalTensor& down_a, const OptionalTensor& down_b, double up_scale, double gate_scale,
    double down_scale, string norm, double norm_eps, string activation, double dropout_p,
    int64_t keep_up, int64_t keep_gate, int64_t workspace, string backend,
    std::optional<ScalarType> compute_dtype, const Tensor& seed) {
  auto [y, up, gate] = mlp_fwd(
      x,
      {w_up,
       w_down,
       b_up,
       b_down,
       w_gate,
       b_gate,
       {up_a, up_b, up_scale},
       {gate_a, gate_b, gate_scale},
       {down_a, down_b, down_scale}},
      seed,
      {activation,
       dropout_p,
       workspace,
       backend,
       compute_dtype.value_or(x.scalar_type()),
       {norm, norm_weight, norm_bias, norm_eps}},
      {keep_up, keep_gate});
  return {y, up, gate};
}

using MlpGradientTuple = decltype(std::tuple_cat(MlpGradients()));
MlpGradientTuple mlp_bwd_op(
    const OptionalTensor& dy, const Tensor& x, const Tensor& w_up, const Tensor& w_down,
    const OptionalTensor& b_up, const OptionalTensor& b_down, const OptionalTensor& w_gate,
    const OptionalTensor& b_gate, const OptionalTensor& norm_weight,
    const OptionalTensor& norm_bias, const OptionalTensor& up_a, const OptionalTensor& up_b,
    const OptionalTensor& gate_a, const OptionalTensor& gate_b, const OptionalTensor& down_a,
    const OptionalTensor& down_b, double up_scale, double gate_scale, double down_scale,
    string norm, double norm_eps, string activation, double dropout_p, int64_t keep_up,
    int64_t keep_gate, int64_t workspace, string backend, std::optional<ScalarType> compute_dtype,
    const Tensor& seed, const OptionalTensor& y, const OptionalTensor& up,
    const OptionalTensor& gate, c10::List<bool> output_mask, c10::List<bool> wide_mask) {
  TORCH_CHECK_VALUE(dy.has_value(), "mlp_bwd: dy must be given");
  const ScalarType compute = compute_dtype.value_or(x.scalar_type());
  const Tensor nothing = at::empty({0, 0}, x.options().dtype(compute));
  const auto wanted = read_mask<kMlpGradients>("output_mask", output_mask);
  const auto wide = read_mask<kMlpGradients>("wide_mask", wide_mask, /*optional=*/true);
  return std::tuple_cat(mlp_bwd(
      *dy, x,
      {w_up,
       w_down,
       b_up,
       b_down,
       w_gate,
       b_gate,
       {up_a, up_b, up_scale},
       {gate_a, gate_b, gate_scale},
       {down_a, down_b, down_scale}},
      up.value_or(nothing), gate.value_or(nothing), seed,
      {activation,
       dropout_p,
       workspace,
       backend,
       compute,
       {norm, norm_weight, norm_bias, norm_eps}},
      wanted, wide));
}

std::vector<string> activation_names() {
#define FUSED_REMAT_NAME(name, Act) name,
  return {FUSED_REMAT_ACTIVATIONS(FUSED_REMAT_NAME)};
#undef FUSED_REMAT_NAME
}

}  // namespace

namespace calls {

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
  const string arguments =
      "Tensor x, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? b_down, Tensor? w_gate, Tensor? "
      "b_gate, Tensor? norm_weight, Tensor? norm_bias, Tensor? up_a, Tensor? up_b, Tensor? gate_a, "
      "Tensor? gate_b, Tensor? down_a, Tensor? down_b, float up_scale, float gate_scale, float "
      "down_scale, str norm, float norm_eps, str activation, "
      "float dropout_p, int keep_up, int keep_gate, int workspace, str backend, ScalarType? "
      "compute_dtype";
  m.def(("mlp(" + arguments + "=None) -> Tensor").c_str());
  m.def(("mlp_reference(" + arguments + ", Tensor seed) -> Tensor").c_str());
  m.def(("mlp_fwd(" + arguments + ", Tensor seed) -> (Tensor y, Tensor up, Tensor gate)").c_str());
  m.def(("mlp_bwd(Tensor? dy, " + arguments +
         ", Tensor seed, Tensor? y, Tensor? up, Tensor? gate, bool[] output_mask, bool[] "
         "wide_mask=[]) -> (Tensor dx, Tensor dw_up, Tensor dw_down, Tensor db_up, Tensor db_down, "
         "Tensor dw_gate, Tensor db_gate, Tensor dnorm_weight, Tensor dnorm_bias, Tensor dup_a, "
         "Tensor dup_b, Tensor dgate_a, Tensor dgate_b, Tensor ddown_a, Tensor ddown_b)")
            .c_str());
  describe_remat_op("mlp", /*saved_results=*/{false, true, true});
  // [axis (0 tokens, 1 features, 2 one kernel without tiles), rows, features, bytes] of the tiles
  // that the streaming would use: what explain prints.
  m.def(
      "mlp_plan(int rows, int d_in, int d_out, int hidden_features, bool gated, bool backward, "
      "bool dropout,"
      " ScalarType x_dtype, ScalarType weight_dtype, ScalarType compute_dtype, int workspace, str "
      "backend,"
      " str device, bool norm=False, int[3] ranks=[0, 0, 0], str activation='gelu', int "
      "kept=0) -> int[]");
  for (const string suffix : kBackends) {
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
  m.impl("mlp", torch::CppFunction::makeFromBoxedFunction<&remat_without_grad>());
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
  m.impl("mlp", torch::CppFunction::makeFromBoxedFunction<&remat_autograd>());
  for (const char* op : {"mlp_fwd", "mlp_bwd"})
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  not_differentiable(m, {"mlp_fwd_chunk", "mlp_bwd_chunk", "column_sums"});
}

TORCH_LIBRARY_IMPL(fused_remat, AutocastCPU, m) {
  m.impl("mlp", torch::CppFunction::makeFromBoxedFunction<&remat_autocast_cpu>());
}
TORCH_LIBRARY_IMPL(fused_remat, AutocastCUDA, m) {
  m.impl("mlp", torch::CppFunction::makeFromBoxedFunction<&remat_autocast_cuda>());
}

}  // namespace fused_remat
