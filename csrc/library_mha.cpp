// Every schema of multi-head attention in one place, and which function implements it. Its argument
// list is too long for a signature: the kernels read the dispatcher's stack.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "autograd/remat.h"
#include "mha_ops.h"

namespace fused_remat {
namespace {

using at::IValue;
using at::Tensor;
using std::string;
using torch::jit::Stack;

// torch takes at most 64 arguments, and backward has most of them: more settings need to share one.
const string kArguments =
    "Tensor query, Tensor? key, Tensor? value, Tensor w_q, Tensor? w_k, Tensor? w_v, Tensor? b_q, "
    "Tensor? b_k, Tensor? b_v, Tensor w_out, Tensor? b_out, Tensor? bias_k, Tensor? bias_v, "
    "Tensor? norm_weight, Tensor? norm_bias, Tensor? q_norm, Tensor? k_norm, Tensor? cos, "
    "Tensor? sin, Tensor? attn_mask, Tensor? key_mask, Tensor? q_a, Tensor? q_b, Tensor? k_a, "
    "Tensor? k_b, Tensor? v_a, Tensor? v_b, Tensor? out_a, Tensor? out_b, "
    "int num_heads, int num_kv_heads, bool add_zero_attn, str norm, float norm_eps, "
    "float qk_norm_eps, bool rotary_interleaved, int causal, int window_left, int window_right, "
    "float dropout_p, float scale, float softcap, int need_weights, float[] adapter_scales, "
    "bool keep_q, bool keep_k, bool keep_v, bool keep_out, int workspace, str backend, "
    "ScalarType? compute_dtype";

// Arguments in their order on the stack.
class Reader {
 public:
  explicit Reader(const IValue* first) : next_(first) {}

  const IValue& value() { return *next_++; }
  Tensor tensor() { return value().toTensor(); }
  OptionalTensor optional() { return value().toOptional<Tensor>(); }
  int64_t integer() { return value().toInt(); }
  double number() { return value().toDouble(); }
  bool flag() { return value().toBool(); }
  string text() { return value().toStringRef(); }
  std::array<AdapterFactors, kMhaAdapters> adapters() {
    std::array<AdapterFactors, kMhaAdapters> adapters;
    for (AdapterFactors& adapter : adapters) {
      adapter.a = optional();
      adapter.b = optional();
    }
    return adapters;
  }
  std::array<double, kMhaAdapters> scales() {
    const c10::List<double> list = value().toDoubleList();
    TORCH_CHECK_VALUE(
        list.size() == kMhaAdapters, "adapter_scales must have ", int(kMhaAdapters),
        " entries, got ", list.size());
    std::array<double, kMhaAdapters> scales;
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = list.get(i);
    return scales;
  }

 private:
  const IValue* next_;
};

// Braces evaluate from left to right, in the order of kArguments.
MhaOperands read_operands(Reader& r) {
  return {r.tensor(),   r.optional(), r.optional(), r.tensor(),   r.optional(), r.optional(),
          r.optional(), r.optional(), r.optional(), r.tensor(),   r.optional(), r.optional(),
          r.optional(), r.optional(), r.optional(), r.optional(), r.optional(), r.optional(),
          r.optional(), r.optional(), r.optional(), r.adapters()};
}

MhaOptions read_options(Reader& r, const Tensor& query) {
  MhaOptions options{
      r.integer(), r.integer(), r.flag(),           r.text(),
      r.number(),  r.number(),  r.flag(),           r.integer(),
      r.integer(), r.integer(), r.number(),         r.number(),
      r.number(),  r.integer(), r.scales(),         {r.flag(), r.flag(), r.flag(), r.flag()},
      r.integer(), r.text(),    query.scalar_type()};
  const IValue& compute_dtype = r.value();
  if (!compute_dtype.isNone()) options.compute_dtype = compute_dtype.toScalarType();
  return options;
}

void mha_fwd_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Reader reader(stack->data() + (stack->size() - count));
  const MhaOperands operands = read_operands(reader);
  const MhaOptions options = read_options(reader, operands.query);
  const MhaForward made = mha_fwd(operands, options, reader.tensor());
  torch::jit::drop(*stack, count);
  stack->emplace_back(made.y);
  stack->emplace_back(made.weights);
  for (const Tensor& residual : made.residuals) stack->emplace_back(residual);
  stack->emplace_back(made.lse);
}

void mha_bwd_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Reader reader(stack->data() + (stack->size() - count));
  const OptionalTensor dy = reader.optional();
  OptionalTensor dweights = reader.optional();
  const MhaOperands operands = read_operands(reader);
  const MhaOptions options = read_options(reader, operands.query);
  const Tensor seed = reader.tensor();
  reader.optional();  // y and the weights are not read
  reader.optional();
  std::array<OptionalTensor, kMhaResiduals> residuals;
  for (OptionalTensor& residual : residuals) {
    residual = reader.optional();
    if (residual && residual->numel() == 0) residual = std::nullopt;
  }
  const OptionalTensor lse = reader.optional();
  const auto wanted = read_mask<kMhaOperands>("output_mask", reader.value().toBoolList());
  const auto wide =
      read_mask<kMhaOperands>("wide_mask", reader.value().toBoolList(), /*optional=*/true);
  if (options.need_weights == kNoWeights) dweights = std::nullopt;
  const auto gradients =
      mha_bwd(dy, dweights, operands, options, seed, residuals, lse, wanted, wide);
  torch::jit::drop(*stack, count);
  for (const Tensor& gradient : gradients)
    stack->emplace_back(gradient.defined() ? gradient : at::empty({0}, operands.query.options()));
}

void mha_plan_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Reader reader(stack->data() + (stack->size() - count));
  const MhaOperands operands = read_operands(reader);
  const MhaOptions options = read_options(reader, operands.query);
  const std::vector<int64_t> plan = mha_plan(operands, options);
  torch::jit::drop(*stack, count);
  stack->emplace_back(plan);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_remat, m) {
  m.def(
      ("multi_head_attention(" + kArguments + "=None) -> (Tensor y, Tensor weights)").c_str(),
      kExactStrides);
  m.def(
      ("multi_head_attention_reference(" + kArguments +
       ", Tensor seed) -> (Tensor y, Tensor weights)")
          .c_str(),
      kExactStrides);
  m.def(
      ("multi_head_attention_fwd(" + kArguments +
       ", Tensor seed) -> (Tensor y, Tensor weights, Tensor q, Tensor k, Tensor v, Tensor out, "
       "Tensor lse)")
          .c_str(),
      kExactStrides);
  string gradients = "Tensor d0";
  for (int i = 1; i < kMhaOperands; ++i) gradients += ", Tensor d" + std::to_string(i);
  m.def(
      ("multi_head_attention_bwd(Tensor? dy, Tensor? dweights, " + kArguments +
       ", Tensor seed, Tensor? y, Tensor? weights, Tensor? q, Tensor? k, Tensor? v, Tensor? out, "
       "Tensor? lse, bool[] output_mask, bool[] wide_mask=[]) -> (" +
       gradients + ")")
          .c_str(),
      kExactStrides);
  // [key-value heads, token rows, bytes] that the passes would handle at a time: what explain
  // prints.
  m.def(("multi_head_attention_plan(" + kArguments + "=None) -> int[]").c_str());
  describe_remat_op(
      "multi_head_attention", /*saved_results=*/{false, false, true, true, true, true, true});
}

TORCH_LIBRARY_IMPL(fused_remat, CompositeExplicitAutograd, m) {
  m.impl("multi_head_attention", torch::CppFunction::makeFromBoxedFunction<&remat_without_grad>());
  m.impl("multi_head_attention_fwd", torch::CppFunction::makeFromBoxedFunction<&mha_fwd_kernel>());
  m.impl("multi_head_attention_bwd", torch::CppFunction::makeFromBoxedFunction<&mha_bwd_kernel>());
  m.impl(
      "multi_head_attention_plan", torch::CppFunction::makeFromBoxedFunction<&mha_plan_kernel>());
}

TORCH_LIBRARY_IMPL(fused_remat, Autograd, m) {
  m.impl("multi_head_attention", torch::CppFunction::makeFromBoxedFunction<&remat_autograd>());
  for (const string op : {"multi_head_attention_fwd", "multi_head_attention_bwd"})
    m.impl(op.c_str(), torch::autograd::autogradNotImplementedFallback());
  m.impl("multi_head_attention_plan", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(fused_remat, AutocastCPU, m) {
  m.impl("multi_head_attention", torch::CppFunction::makeFromBoxedFunction<&remat_autocast_cpu>());
}
TORCH_LIBRARY_IMPL(fused_remat, AutocastCUDA, m) {
  m.impl("multi_head_attention", torch::CppFunction::makeFromBoxedFunction<&remat_autocast_cuda>());
}

}  // namespace fused_remat
