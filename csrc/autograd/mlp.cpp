// Level 1 of the MLP: one autograd node. It saves x, the parameters, the seed and the kept
// residuals, nothing else.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "../aten/activations.h"
#include "../mlp.h"
#include "../mlp_calls.h"
#include "../stream/tiles.h"
#include "node.h"

namespace fused_remat {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

// The key of this call's dropout mask: one draw from torch's generator of the device, so that
// manual_seed reproduces it.
Tensor draw_seed(const Tensor& x, double dropout_p) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(x.device());
  if (dropout_p == 0.0) return at::empty({0}, options);
  return at::randint(
      std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), {1}, options);
}

// What backward needs, and its flat form in the order that the node saves it. An absent tensor is
// undefined there.
constexpr size_t kSavedInputs = 8, kSaved = 10;
using FlatOperands = std::array<Tensor, kSaved>;
struct Operands {
  Tensor x;
  MlpLayer layer;
  Tensor seed, up, gate;
};

Operands operands_of(const FlatOperands& t) {
  const auto optional = [](const Tensor& o) {
    return o.defined() ? OptionalTensor(o) : std::nullopt;
  };
  return {
      t[0],
      {t[1], t[2], optional(t[3]), optional(t[4]), optional(t[5]), optional(t[6])},
      t[7],
      t[8],
      t[9]};
}

// The forward in differentiable torch ops, with every operand behind a view of its own: gradients
// taken with respect to the views do not run through one operand into another that depends on it.
variable_list differentiable_gradients(
    const Tensor& dy, const Operands& saved, const MlpOptions& options,
    const MlpGradientMask& wanted) {
  const at::AutoGradMode with_grad(true);
  const BelowAutocast guard;
  std::array<Tensor, kMlpGradients> own;
  const auto view = [&](MlpGradient which, const OptionalTensor& t) {
    if (t && t->defined()) own[which] = t->view_as(*t);
    return own[which].defined() ? OptionalTensor(own[which].to(options.compute_dtype))
                                : std::nullopt;
  };
  const Tensor x = *view(kDx, saved.x), w_up = *view(kDwUp, saved.layer.w_up);
  const Tensor w_down = *view(kDwDown, saved.layer.w_down);
  const OptionalTensor b_up = view(kDbUp, saved.layer.b_up),
                       b_down = view(kDbDown, saved.layer.b_down);
  const OptionalTensor w_gate = view(kDwGate, saved.layer.w_gate),
                       b_gate = view(kDbGate, saved.layer.b_gate);

  const auto act = aten::activation(options.activation).differentiable;
  const Tensor up = at::linear(x, w_up, b_up);
  Tensor hidden = w_gate ? act(at::linear(x, *w_gate, b_gate)) * up : act(up);
  if (options.dropout_p > 0.0) {
    const int64_t features = hidden.size(-1), rows = features == 0 ? 0 : hidden.numel() / features;
    hidden = hidden *
             aten::dropout_scales(
                 saved.seed, options.dropout_p, 0, rows, 0, features, features, hidden.options())
                 .view(hidden.sizes());
  }
  const Tensor y = at::linear(hidden, w_down, b_down);

  variable_list inputs;
  for (size_t i = 0; i < kMlpGradients; ++i)
    if (wanted[i]) inputs.push_back(own[i]);
  variable_list gradients(kMlpGradients);
  if (inputs.empty()) return gradients;
  const variable_list taken =
      torch::autograd::grad({y}, inputs, {dy}, /*retain_graph=*/true, /*create_graph=*/true);
  for (size_t i = 0, next = 0; i < kMlpGradients; ++i)
    if (wanted[i]) gradients[i] = taken[next++];
  return gradients;
}

variable_list streamed_gradients(
    const Tensor& dy, const Operands& saved, const MlpOptions& options,
    const MlpGradientMask& wanted) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto or_nothing = [&](const Tensor& residual) {
    return residual.defined() ? residual
                              : at::empty({0, 0}, saved.x.options().dtype(options.compute_dtype));
  };
  const MlpGradients made = calls::mlp_bwd(
      dy, saved.x, saved.layer, or_nothing(saved.up), or_nothing(saved.gate), saved.seed, options,
      wanted);
  variable_list gradients(kMlpGradients);
  for (size_t i = 0; i < kMlpGradients; ++i)
    if (wanted[i]) gradients[i] = made[i];
  return gradients;
}

// The same for compiled autograd, as a pure function of packed arguments.
variable_list packed_gradients(const variable_list& grads, const std::vector<at::IValue>& packed) {
  if (!grads[0].defined()) return variable_list(kMlpGradients);
  torch::dynamo::autograd::PackedArgs args(packed);
  FlatOperands operands;
  for (Tensor& operand : operands) operand = args.unpack<Tensor>();
  MlpOptions options;
  options.activation = args.unpack<std::string>();
  options.dropout_p = args.unpack<double>();
  options.workspace = args.unpack<int64_t>();
  options.backend = args.unpack<std::string>();
  options.compute_dtype = args.unpack<at::ScalarType>();
  return streamed_gradients(
      grads[0], operands_of(operands), options, args.unpack<MlpGradientMask>());
}

struct MlpBackward : public torch::autograd::Node {
  std::array<SavedVariable, kSaved> saved;
  MlpOptions options;
  bool released = false;

  // Everything that exists before the compute: inside someone's checkpoint, its replay can stop
  // right here.
  void save_inputs(const Tensor& x, const MlpLayer& layer, const Tensor& seed) {
    const OptionalTensor inputs[kSavedInputs] = {
        x, layer.w_up, layer.w_down, layer.b_up, layer.b_down, layer.w_gate, layer.b_gate, seed};
    for (size_t i = 0; i < kSavedInputs; ++i)
      if (inputs[i]) saved[i] = SavedVariable(*inputs[i], /*is_output=*/false);
  }
  // Only what is kept: a tensor saved after the compute makes a checkpoint's replay run the
  // compute.
  void save_residuals(const MlpForward& forward, const MlpKeep& keep) {
    if (keep.up > 0) saved[kSavedInputs] = SavedVariable(forward.up, /*is_output=*/false);
    if (keep.gate > 0) saved[kSavedInputs + 1] = SavedVariable(forward.gate, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    if (!grads[0].defined()) return variable_list(kMlpGradients);
    const Operands operands = operands_of(unpack());
    // Gradients are being recorded under create_graph alone; the streaming has no derivative of its
    // own.
    return at::GradMode::is_enabled()
               ? differentiable_gradients(grads[0], operands, options, wanted())
               : streamed_gradients(grads[0], operands, options, wanted());
  }

  void release_variables() override {
    for (SavedVariable& variable : saved) variable.reset_data();
    released = true;
  }

  std::string name() const override { return "MlpBackward"; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const SavedVariable& variable : saved) args.collect(variable, /*is_output=*/false);
    args.collect(options.activation);
    args.collect(options.dropout_p);
    args.collect(options.workspace);
    args.collect(options.backend);
    args.collect(options.compute_dtype);
  }

  variable_list apply_with_saved(
      const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (SavedVariable& variable : saved) swap.before(variable);
    variable_list gradients = trace_gradients(grads, swap);
    for (SavedVariable& variable : saved) swap.after(variable);
    return gradients;
  }

 private:
  FlatOperands unpack() const {
    FlatOperands operands;
    for (size_t i = 0; i < kSaved; ++i) operands[i] = saved[i].unpack();
    return operands;
  }

  MlpGradientMask wanted() const {
    MlpGradientMask mask{};
    for (size_t i = 0; i < kMlpGradients; ++i) mask[i] = task_should_compute_output(i);
    return mask;
  }

  variable_list trace_gradients(
      const variable_list& grads, const torch::dynamo::autograd::SwapSavedVariables& swap) const {
    using namespace torch::dynamo::autograd;
    PackedArgs args;
    for (const Tensor& operand : unpack()) args.pack(operand);
    args.pack(options.activation);
    args.pack(options.dropout_p);
    args.pack(options.workspace);
    args.pack(options.backend);
    args.pack(options.compute_dtype);
    args.pack(wanted());
    std::vector<at::TypePtr> schema(kSaved, at::TensorType::get());
    for (size_t i = kSaved; i < args.vec().size(); ++i) schema.push_back(args.vec()[i].type());
    const auto& compiler = getPyCompilerInterface();
    // "Custom" gives every trace a name of its own; "traceable" lets the compiler look inside.
    const std::string function = compiler->bind_function(
        swap.get_py_compiler(), name(), packed_gradients, schema, /*is_custom_function=*/true,
        /*is_traceable=*/true);
    return compiler->call_function(
        swap.get_py_compiler(), "apply_functional", function, grads, args.vec(),
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            get_input_metadata(next_edges())));
  }
};

std::array<OptionalTensor, kMlpGradients> differentiable_inputs(
    const Tensor& x, const MlpLayer& layer) {
  return {x, layer.w_up, layer.w_down, layer.b_up, layer.b_down, layer.w_gate, layer.b_gate};
}

// torch.func transforms and forward-mode tangents would vanish silently in a C++ node.
void refuse_transforms(const std::array<OptionalTensor, kMlpGradients>& inputs) {
  for (const OptionalTensor& t : inputs) {
    if (!t) continue;
    const c10::DispatchKeySet keys = t->key_set();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !keys.has(c10::DispatchKey::FuncTorchGradWrapper) &&
            !keys.has(c10::DispatchKey::FuncTorchBatched),
        "torch.ops.fused_remat.mlp does not run under torch.func transforms; call fused_remat.mlp, "
        "which takes the "
        "reference path there");
    TORCH_CHECK_NOT_IMPLEMENTED(
        !t->_fw_grad(/*level=*/0).defined(),
        "torch.ops.fused_remat.mlp has no forward-mode derivative; call fused_remat.mlp, which "
        "takes the reference "
        "path there");
  }
}

}  // namespace

Tensor mlp_without_grad(
    const Tensor& x, const MlpLayer& layer, const MlpOptions& options, const MlpKeep&) {
  return calls::mlp_fwd(x, layer, draw_seed(x, options.dropout_p), options, /*keep=*/{0, 0}).y;
}

Tensor mlp_autograd(
    const Tensor& x, const MlpLayer& layer, const MlpOptions& options, const MlpKeep& keep) {
  const auto inputs = differentiable_inputs(x, layer);
  refuse_transforms(inputs);
  const bool record = at::GradMode::is_enabled() &&
                      std::any_of(inputs.begin(), inputs.end(), [](const OptionalTensor& t) {
                        return t && t->requires_grad();
                      });
  if (!record) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return mlp_without_grad(x, layer, options, keep);
  }
  const auto node = make_node<MlpBackward>();
  torch::autograd::edge_list edges;
  for (const OptionalTensor& t : inputs)
    edges.push_back(t ? torch::autograd::impl::gradient_edge(*t) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  node->options = options;
  const Tensor seed = draw_seed(x, options.dropout_p);
  node->save_inputs(x, layer, seed);
  const MlpForward forward = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return calls::mlp_fwd(x, layer, seed, options, keep);
  }();
  node->save_residuals(forward, keep);
  torch::autograd::set_history(forward.y, node);
  return forward.y;
}

}  // namespace fused_remat
