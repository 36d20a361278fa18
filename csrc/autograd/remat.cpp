#include "remat.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/new_empty.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "remat_node.h"

namespace fused_remat {

using at::IValue;
using at::Tensor;
using torch::jit::Stack;

namespace {

std::unordered_map<std::string, std::vector<bool>>& described() {
  static std::unordered_map<std::string, std::vector<bool>> ops;
  return ops;
}

c10::OperatorHandle handle(const std::string& name, const char* suffix) {
  return c10::Dispatcher::singleton().findSchemaOrThrow((name + suffix).c_str(), "");
}

}  // namespace

void describe_remat_op(const char* name, std::vector<bool> saved_results) {
  described()[std::string("fused_remat::") + name] = std::move(saved_results);
}

RematOp::RematOp(const c10::OperatorHandle& op)
    : name(op.operator_name().name),
      forward(handle(name, "_fwd")),
      backward(handle(name, "_bwd")),
      arguments(op.schema().arguments().size()),
      outputs(op.schema().returns().size()),
      saved_results(described().at(name)),
      wide_gradients(backward.schema().arguments().back().name() == "wide_mask") {
  const auto tensor = at::TensorType::get();
  for (size_t i = 0; i < arguments; ++i) {
    const c10::Argument& argument = op.schema().arguments()[i];
    const bool is_tensor = argument.type()->isSubtypeOf(*at::OptionalType::create(tensor));
    (is_tensor ? tensors : settings).push_back(i);
    if (argument.name() == "dropout_p") dropout_p = i;
    if (argument.name() == "compute_dtype") compute_dtype = i;
    if (argument.name().rfind("keep_", 0) == 0) keeps.push_back(i);
  }
}

const RematOp& RematOp::of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::unique_ptr<RematOp>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& entry = known[op.operator_name().name];
  if (!entry) entry = std::make_unique<RematOp>(op);
  return *entry;
}

namespace {

using Arguments = std::vector<IValue>;

Arguments take_arguments(const RematOp& op, Stack& stack) {
  Arguments arguments(
      std::make_move_iterator(stack.end() - op.arguments), std::make_move_iterator(stack.end()));
  torch::jit::drop(stack, op.arguments);
  IValue& compute_dtype = arguments[op.compute_dtype];
  if (compute_dtype.isNone()) compute_dtype = arguments[op.tensors[0]].toTensor().scalar_type();
  return arguments;
}

// The key of this call's dropout mask: one draw from torch's generator of the device, so that
// manual_seed reproduces it. Without dropout it is empty, and of the class of the first operand:
// the parts of an op must all be DTensors or none.
Tensor draw_seed(const RematOp& op, const Arguments& arguments) {
  const Tensor& first = arguments[op.tensors[0]].toTensor();
  const auto options = at::TensorOptions().dtype(at::kLong).device(first.device());
  if (arguments[op.dropout_p].toDouble() == 0.0) return first.new_empty({0}, options);
  return at::randint(
      std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), {1}, options);
}

// torch.func transforms and forward-mode tangents would vanish silently in a C++ node.
void refuse_transforms(const RematOp& op, const Tensor& t) {
  const c10::DispatchKeySet keys = t.key_set();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !keys.has(c10::DispatchKey::FuncTorchGradWrapper) &&
          !keys.has(c10::DispatchKey::FuncTorchBatched),
      "torch.ops.", op.name,
      " does not run under torch.func transforms; call the function of this name in "
      "fused_remat, which takes the reference path there");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !t._fw_grad(/*level=*/0).defined(), "torch.ops.", op.name,
      " has no forward-mode derivative; call the function of this name in fused_remat, which "
      "takes the reference path there");
}

std::vector<Tensor> run_forward(const RematOp& op, Arguments arguments, const Tensor& seed) {
  arguments.emplace_back(seed);
  op.forward.callBoxed(&arguments);
  std::vector<Tensor> results;
  for (IValue& result : arguments) results.push_back(std::move(result).toTensor());
  return results;
}

void push_outputs(const RematOp& op, std::vector<Tensor>& results, Stack* stack) {
  for (size_t i = 0; i < op.outputs; ++i) stack->emplace_back(std::move(results[i]));
}

template <at::DeviceType kDevice>
void autocast(const c10::OperatorHandle& handle, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const RematOp& op = RematOp::of(handle);
  IValue* const arguments = stack->data() + (stack->size() - op.arguments);
  if (arguments[op.compute_dtype].isNone() &&
      arguments[op.tensors[0]].toTensor().scalar_type() != at::kDouble)
    arguments[op.compute_dtype] = at::autocast::get_autocast_dtype(kDevice);
  handle.callBoxed(stack);
}

}  // namespace

void remat_without_grad(const c10::OperatorHandle& handle, Stack* stack) {
  const RematOp& op = RematOp::of(handle);
  Arguments arguments = take_arguments(op, *stack);
  for (const size_t keep : op.keeps)
    arguments[keep] = arguments[keep].isBool() ? IValue(false) : IValue(0);
  const Tensor seed = draw_seed(op, arguments);
  auto results = run_forward(op, std::move(arguments), seed);
  push_outputs(op, results, stack);
}

void remat_autograd(const c10::OperatorHandle& handle, Stack* stack) {
  const RematOp& op = RematOp::of(handle);
  const Stack& peek = *stack;
  const size_t first = peek.size() - op.arguments;
  bool record = false;
  for (const size_t i : op.tensors) {
    if (peek[first + i].isNone()) continue;
    const Tensor& t = peek[first + i].toTensor();
    refuse_transforms(op, t);
    record = record || t.requires_grad();
  }
  if (!record || !at::GradMode::is_enabled()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return remat_without_grad(handle, stack);
  }
  const Arguments arguments = take_arguments(op, *stack);
  const auto node = make_node<RematBackward>(op);
  const Tensor seed = draw_seed(op, arguments);
  node->save_arguments(arguments, seed);
  auto results = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return run_forward(op, arguments, seed);
  }();
  for (size_t i = 0; i < op.outputs; ++i) torch::autograd::set_history(results[i], node);
  node->save_results(results);
  push_outputs(op, results, stack);
}

void remat_autocast_cpu(const c10::OperatorHandle& op, Stack* stack) {
  autocast<at::kCPU>(op, stack);
}
void remat_autocast_cuda(const c10::OperatorHandle& op, Stack* stack) {
  autocast<at::kCUDA>(op, stack);
}

}  // namespace fused_remat
