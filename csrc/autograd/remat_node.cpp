#include "remat_node.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace fused_remat {

using at::IValue;
using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

IValue or_none(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }

// The flat form of what backward needs: tensor arguments, seed, results, then settings.
size_t tensor_count(const RematOp& op) { return op.tensors.size() + 1 + op.saved_results.size(); }

// The arguments of the op as it was called, from the flat form.
std::vector<IValue> arguments_of(const RematOp& op, const std::vector<IValue>& flat) {
  std::vector<IValue> arguments(op.arguments);
  for (size_t i = 0; i < op.tensors.size(); ++i) arguments[op.tensors[i]] = flat[i];
  for (size_t i = 0; i < op.settings.size(); ++i)
    arguments[op.settings[i]] = flat[tensor_count(op) + i];
  return arguments;
}

c10::List<bool> list_of(const std::vector<bool>& flags) {
  c10::List<bool> list;
  for (const bool flag : flags) list.push_back(flag);
  return list;
}

variable_list streamed_gradients(
    const RematOp& op, const variable_list& grads, const std::vector<IValue>& flat,
    const GradientMask& mask) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  torch::jit::Stack stack;
  for (size_t i = 0; i < op.outputs; ++i)
    stack.push_back(i < grads.size() ? or_none(grads[i]) : IValue());
  for (IValue& argument : arguments_of(op, flat)) stack.push_back(std::move(argument));
  for (size_t i = op.tensors.size(); i < tensor_count(op); ++i) stack.push_back(flat[i]);
  stack.emplace_back(list_of(mask.wanted));
  if (op.wide_gradients) stack.emplace_back(list_of(mask.wide));
  op.backward.callBoxed(&stack);
  variable_list gradients(op.tensors.size());
  for (size_t i = 0; i < gradients.size(); ++i)
    if (mask.wanted[i]) gradients[i] = stack[i].toTensor();
  return gradients;
}

// The reference, recorded, with every operand behind a view of its own: gradients taken with
// respect to the views do not run through one operand into another that depends on it.
variable_list differentiable_gradients(
    const RematOp& op, const variable_list& grads, const std::vector<IValue>& flat,
    const std::vector<bool>& wanted) {
  const at::AutoGradMode with_grad(true);
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  torch::jit::Stack stack = arguments_of(op, flat);
  variable_list inputs;
  for (size_t i = 0; i < op.tensors.size(); ++i) {
    if (!wanted[i]) continue;
    const Tensor& operand = flat[i].toTensor();
    inputs.push_back(operand.view_as(operand));
    stack[op.tensors[i]] = inputs.back();
  }
  stack.push_back(flat[op.tensors.size()]);
  variable_list gradients(op.tensors.size()), outputs, output_grads;
  if (inputs.empty()) return gradients;
  c10::Dispatcher::singleton()
      .findSchemaOrThrow((op.name + "_reference").c_str(), "")
      .callBoxed(&stack);
  for (size_t i = 0; i < op.outputs; ++i) {
    if (i >= grads.size() || !grads[i].defined() || !stack[i].toTensor().requires_grad()) continue;
    outputs.push_back(stack[i].toTensor());
    output_grads.push_back(grads[i]);
  }
  const variable_list taken = torch::autograd::grad(
      outputs, inputs, output_grads, /*retain_graph=*/true, /*create_graph=*/true,
      /*allow_unused=*/true);
  for (size_t i = 0, next = 0; i < gradients.size(); ++i)
    if (wanted[i]) gradients[i] = taken[next++];
  return gradients;
}

// Sizes may be symbols here; what was not kept is known to be empty all the same.
bool is_empty(const Tensor& t) { return t.sym_numel().maybe_as_int() == 0; }

bool none_defined(const variable_list& grads) {
  for (const Tensor& grad : grads)
    if (grad.defined()) return false;
  return true;
}

}  // namespace

void RematBackward::save_arguments(const std::vector<IValue>& arguments, const Tensor& seed) {
  torch::autograd::edge_list edges;
  for (const size_t i : op_.tensors) {
    const bool present = !arguments[i].isNone();
    inputs_.push_back(
        present ? SavedVariable(arguments[i].toTensor(), /*is_output=*/false) : SavedVariable());
    edges.push_back(
        present ? torch::autograd::impl::gradient_edge(arguments[i].toTensor())
                : torch::autograd::Edge());
  }
  inputs_.emplace_back(seed, /*is_output=*/false);
  for (const size_t i : op_.settings) settings_.push_back(arguments[i]);
  set_next_edges(std::move(edges));
}

void RematBackward::save_results(const std::vector<Tensor>& results) {
  for (size_t i = 0; i < op_.saved_results.size(); ++i)
    results_.push_back(
        op_.saved_results[i] && !is_empty(results[i])
            ? SavedVariable(results[i], /*is_output=*/i < op_.outputs)
            : SavedVariable());
}

std::vector<IValue> RematBackward::unpack() {
  std::vector<IValue> flat;
  for (const SavedVariable& input : inputs_) flat.push_back(or_none(input.unpack()));
  for (size_t i = 0; i < results_.size(); ++i)
    flat.push_back(or_none(i < op_.outputs ? results_[i].unpack(getptr()) : results_[i].unpack()));
  flat.insert(flat.end(), settings_.begin(), settings_.end());
  return flat;
}

GradientMask RematBackward::mask() const {
  GradientMask mask;
  for (size_t i = 0; i < op_.tensors.size(); ++i) {
    mask.wanted.push_back(task_should_compute_output(i));
    mask.wide.push_back(mask.wanted.back() && is_wide(i));
  }
  return mask;
}

// The engine casts a gradient to what the next node says it takes: the tensor's dtype, unless
// Tensor.grad_dtype says otherwise. What it would widen need not be rounded first.
bool RematBackward::is_wide(size_t i) const {
  const torch::autograd::Edge& edge = next_edge(i);
  if (!edge.is_valid()) return false;
  const torch::autograd::InputMetadata& taken = edge.function->input_metadata(edge.input_nr);
  if (taken.was_default_constructed()) return false;
  const at::ScalarType dtype = taken.dtype().toScalarType();
  return (dtype == at::kBFloat16 || dtype == at::kHalf) && taken.grad_dtype() == at::kFloat;
}

variable_list RematBackward::apply(variable_list&& grads) {
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  if (none_defined(grads)) return variable_list(op_.tensors.size());
  // Gradients are being recorded under create_graph alone; the streaming has no derivative of its
  // own.
  return at::GradMode::is_enabled() ? differentiable_gradients(op_, grads, unpack(), mask().wanted)
                                    : streamed_gradients(op_, grads, unpack(), mask());
}

void RematBackward::release_variables() {
  for (SavedVariable& variable : inputs_) variable.reset_data();
  for (SavedVariable& variable : results_) variable.reset_data();
  released_ = true;
}

// As torch names its own nodes: MultiHeadAttentionBackward for fused_remat::multi_head_attention.
std::string RematBackward::name() const {
  std::string camel;
  bool upper = true;
  for (const char c : op_.name.substr(op_.name.find("::") + 2)) {
    if (c != '_') camel += upper ? static_cast<char>(std::toupper(c)) : c;
    upper = c == '_';
  }
  return camel + "Backward";
}

void RematBackward::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  for (const SavedVariable& input : inputs_) args.collect(input, /*is_output=*/false);
  for (size_t i = 0; i < results_.size(); ++i)
    args.collect(results_[i], /*is_output=*/i < op_.outputs);
  for (const IValue& setting : settings_) args.collect(setting);
}

variable_list RematBackward::apply_with_saved(
    const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) {
  for (SavedVariable& variable : inputs_) swap.before(variable);
  for (SavedVariable& variable : results_) swap.before(variable);
  variable_list gradients = trace(grads, swap);
  for (SavedVariable& variable : inputs_) swap.after(variable);
  for (SavedVariable& variable : results_) swap.after(variable);
  return gradients;
}

// Backward as a pure function of packed values, for compiled autograd, which itself refuses
// parameters whose grad_dtype is not their own.
variable_list RematBackward::trace(
    const variable_list& grads, const torch::dynamo::autograd::SwapSavedVariables& swap) {
  using namespace torch::dynamo::autograd;
  const RematOp& op = op_;
  const size_t tensors = tensor_count(op);
  const auto function = [&op, tensors](
                            const variable_list& grads, const std::vector<IValue>& values) {
    if (none_defined(grads)) return variable_list(op.tensors.size());
    std::vector<IValue> flat(values.begin(), values.end() - 1);
    for (size_t i = 0; i < tensors; ++i) flat[i] = or_none(flat[i].toTensor());
    return streamed_gradients(op, grads, flat, {values.back().toBoolList().vec(), /*wide=*/{}});
  };
  std::vector<IValue> values = unpack();
  for (size_t i = 0; i < tensors; ++i)
    if (values[i].isNone()) values[i] = Tensor();
  values.emplace_back(list_of(mask().wanted));
  std::vector<at::TypePtr> schema(tensors, at::TensorType::get());
  for (size_t i = tensors; i < values.size(); ++i) schema.push_back(values[i].type());
  const auto& compiler = getPyCompilerInterface();
  // "Custom" gives every trace a name of its own; "traceable" lets the compiler look inside.
  const std::string bound = compiler->bind_function(
      swap.get_py_compiler(), name(), function, schema, /*is_custom_function=*/true,
      /*is_traceable=*/true);
  return compiler->call_function(
      swap.get_py_compiler(), "apply_functional", bound, grads, values,
      IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
          get_input_metadata(next_edges())));
}

}  // namespace fused_remat
