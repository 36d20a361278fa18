// Schemas of the level-3 ops of narrow MLPs, which the CUDA C++ backend alone has.
#include <torch/library.h>

#include "backends.h"
#include "cuda/mlp_small.h"
#include "mlp_calls.h"

namespace fused_remat {
namespace {

using at::ScalarType;
using at::Tensor;
using std::string;

// Signatures of the implementers, which are in the CUDA library.
using SmallForward = void(
    const Tensor& x, const Tensor& w_up, const Tensor& w_down, const OptionalTensor& b_up,
    const OptionalTensor& b_down, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    const Tensor& seed, string activation, double dropout_p, const Tensor& y);
using SmallBackward = void(
    const Tensor& dy, const Tensor& x, const Tensor& w_up, const Tensor& w_down,
    const OptionalTensor& b_up, const OptionalTensor& w_gate, const OptionalTensor& b_gate,
    const Tensor& seed, string activation, double dropout_p, ScalarType compute, int64_t workspace,
    const OptionalTensor& dx, const OptionalTensor& dw_up, const OptionalTensor& dw_down,
    const OptionalTensor& db_up, const OptionalTensor& db_down, const OptionalTensor& dw_gate,
    const OptionalTensor& db_gate);

std::vector<string> mlp_small_why_not(
    int64_t rows, int64_t d_in, int64_t d_out, int64_t hidden_features, ScalarType compute,
    at::ArrayRef<ScalarType> operands, bool keeps, bool norm, bool adapted) {
  return mlp_small::why_not(
      {rows, d_in, d_out, hidden_features, compute, operands.vec(), keeps, norm, adapted});
}

}  // namespace

namespace calls {

void mlp_small_fwd(
    const Tensor& x, const MlpLayer& layer, const Tensor& seed, const MlpOptions& options,
    const Tensor& y) {
  level3<SmallForward>("mlp_small_fwd", options.backend)
      .call(
          x, layer.w_up, layer.w_down, layer.b_up, layer.b_down, layer.w_gate, layer.b_gate, seed,
          options.activation, options.dropout_p, y);
}

void mlp_small_bwd(
    const Tensor& dy, const Tensor& x, const MlpLayer& layer, const Tensor& seed,
    const MlpOptions& options, const MlpGradients& to) {
  level3<SmallBackward>("mlp_small_bwd", options.backend)
      .call(
          dy, x, layer.w_up, layer.w_down, layer.b_up, layer.w_gate, layer.b_gate, seed,
          options.activation, options.dropout_p, options.compute_dtype, options.workspace,
          or_none(to[kDx]), or_none(to[kDwUp]), or_none(to[kDwDown]), or_none(to[kDbUp]),
          or_none(to[kDbDown]), or_none(to[kDwGate]), or_none(to[kDbGate]));
}

}  // namespace calls

TORCH_LIBRARY_FRAGMENT(fused_remat, m) {
  m.def(
      "mlp_small_fwd_cuda(Tensor x, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? b_down, "
      "Tensor? w_gate, Tensor? b_gate, Tensor seed, str activation, float dropout_p, Tensor(a!) y) "
      "-> ()");
  m.def(
      "mlp_small_bwd_cuda(Tensor dy, Tensor x, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? "
      "w_gate, Tensor? b_gate, Tensor seed, str activation, float dropout_p, ScalarType compute, "
      "int workspace, Tensor(a!)? dx, Tensor(b!)? dw_up, Tensor(c!)? dw_down, Tensor(d!)? db_up, "
      "Tensor(e!)? db_down, Tensor(f!)? dw_gate, Tensor(g!)? db_gate) -> ()");
  // Every reason why an MLP on the backend "cuda" is streamed; empty: one kernel makes each pass.
  m.def(
      "mlp_small_why_not(int rows, int d_in, int d_out, int hidden_features, ScalarType compute, "
      "ScalarType[] operands, bool keeps, bool norm, bool adapted) -> str[]");
  m.impl("mlp_small_why_not", mlp_small_why_not);
}

TORCH_LIBRARY_IMPL(fused_remat, Autograd, m) {
  for (const char* op : {"mlp_small_fwd_cuda", "mlp_small_bwd_cuda"})
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fused_remat
