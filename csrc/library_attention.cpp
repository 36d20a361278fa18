// Every schema of attention in one place, and which function implements it.
#include <torch/library.h>

#include "attention_calls.h"
#include "attention_ops.h"
#include "autograd/remat.h"
#include "backends.h"

namespace fused_remat {
namespace {

using at::ScalarType;
using at::Tensor;
using std::string;

// The registered signatures are flat; these adapters group their arguments.
std::tuple<Tensor, Tensor> attention_fwd_op(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& attn_mask,
    const OptionalTensor& key_mask, int64_t causal, int64_t window_left, int64_t window_right,
    double dropout_p, double scale, double softcap, int64_t workspace, string backend,
    std::optional<ScalarType> compute_dtype, const Tensor& seed) {
  return attention_fwd(
      q, k, v, attn_mask, key_mask,
      {causal, window_left, window_right, dropout_p, scale, softcap, workspace, backend,
       compute_dtype.value_or(q.scalar_type())},
      seed);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_bwd_op(
    const OptionalTensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
    const Tensor& v, const OptionalTensor& attn_mask, const OptionalTensor& key_mask,
    int64_t causal, int64_t window_left, int64_t window_right, double dropout_p, double scale,
    double softcap, int64_t workspace, string backend, std::optional<ScalarType> compute_dtype,
    const Tensor& seed, const OptionalTensor& out, const OptionalTensor& lse,
    c10::List<bool> output_mask) {
  c10::SmallVector<bool, 5> wanted;
  for (const bool want : output_mask) wanted.push_back(want);
  return attention_bwd(
      dout, dlse, q, k, v, attn_mask, key_mask,
      {causal, window_left, window_right, dropout_p, scale, softcap, workspace, backend,
       compute_dtype.value_or(q.scalar_type())},
      seed, out, lse, wanted);
}

void define_attention(torch::Library& m) {
  const string arguments =
      "Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? key_mask, int causal, int "
      "window_left, int window_right, float dropout_p, float scale, float softcap, int workspace, "
      "str backend, "
      "ScalarType? compute_dtype";
  m.def(("attention(" + arguments + "=None) -> (Tensor out, Tensor lse)").c_str(), kExactStrides);
  for (const string op : {"attention_fwd", "attention_reference"})
    m.def(
        (op + "(" + arguments + ", Tensor seed) -> (Tensor out, Tensor lse)").c_str(),
        kExactStrides);
  m.def(
      ("attention_bwd(Tensor? dout, Tensor? dlse, " + arguments +
       ", Tensor seed, Tensor? out, Tensor? lse, bool[] output_mask) -> (Tensor dq, Tensor dk, "
       "Tensor dv, Tensor dattn_mask, Tensor dkey_mask)")
          .c_str(),
      kExactStrides);
  describe_remat_op("attention", /*saved_results=*/{true, true});
}

void define_implementer(torch::Library& m, const string& suffix) {
  const string qk = suffix + "(Tensor q, Tensor k, ";
  const string qkv = qk + "Tensor v, " FUSED_REMAT_ATTENDING_SCHEMA ", ";
  m.def(("attention_fwd_" + qkv + "Tensor(a!) out, Tensor(b!) lse) -> ()").c_str());
  m.def(("attention_delta_" + qkv +
         "Tensor lse, Tensor dout, Tensor? dweights, float factor, bool rebuild, Tensor(a!) out, "
         "Tensor(b!) delta, Tensor(c!) correction) -> ()")
            .c_str());
  m.def(("attention_bwd_" + qkv +
         "Tensor lse, Tensor correction, Tensor delta, Tensor dout, Tensor? out, Tensor? dweights, "
         "float "
         "factor, Tensor(a!)? dq, "
         "Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dattn_mask, Tensor(e!)? dkey_mask) -> ()")
            .c_str());
  m.def(("attention_weights_" + qk +
         FUSED_REMAT_ATTENDING_SCHEMA ", Tensor lse, float factor, Tensor(a!) weights) -> ()")
            .c_str());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_remat, m) {
  define_attention(m);
  for (const string suffix : kBackends) define_implementer(m, suffix);
}

TORCH_LIBRARY_IMPL(fused_remat, CompositeExplicitAutograd, m) {
  m.impl("attention", torch::CppFunction::makeFromBoxedFunction<&remat_without_grad>());
  m.impl("attention_fwd", attention_fwd_op);
  m.impl("attention_bwd", attention_bwd_op);
  m.impl("attention_fwd_aten", attention_fwd_tile<aten::attention_fwd>);
  m.impl("attention_delta_aten", attention_delta_tile<aten::attention_delta>);
  m.impl("attention_bwd_aten", attention_bwd_tile<aten::attention_bwd>);
  m.impl("attention_weights_aten", attention_weights_tile<aten::attention_weights>);
}

TORCH_LIBRARY_IMPL(fused_remat, CPU, m) {
  m.impl("attention_fwd_cpp", attention_fwd_tile<cpu::attention_fwd>);
  m.impl("attention_delta_cpp", attention_delta_tile<cpu::attention_delta>);
  m.impl("attention_bwd_cpp", attention_bwd_tile<cpu::attention_bwd>);
  m.impl("attention_weights_cpp", attention_weights_tile<cpu::attention_weights>);
}

TORCH_LIBRARY_IMPL(fused_remat, Autograd, m) {
  m.impl("attention", torch::CppFunction::makeFromBoxedFunction<&remat_autograd>());
  for (const char* op : {"attention_fwd", "attention_bwd"})
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  not_differentiable(m, {"attention_fwd", "attention_delta", "attention_bwd", "attention_weights"});
}

TORCH_LIBRARY_IMPL(fused_remat, AutocastCPU, m) {
  m.impl("attention", torch::CppFunction::makeFromBoxedFunction<&remat_autocast_cpu>());
}
TORCH_LIBRARY_IMPL(fused_remat, AutocastCUDA, m) {
  m.impl("attention", torch::CppFunction::makeFromBoxedFunction<&remat_autocast_cuda>());
}

}  // namespace fused_remat
