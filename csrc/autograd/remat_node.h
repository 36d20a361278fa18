// The autograd node of an op that rebuilds activations. What it keeps is its inputs, the dropout
// seed and the results that backward reads, nothing else; all of it is visible to saved-tensor
// hooks and version-checked.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <string>
#include <vector>

#include "node.h"

namespace fused_remat {

// An op as autograd/remat.h describes it, read off its schemas once.
struct RematOp {
  explicit RematOp(const c10::OperatorHandle& op);
  static const RematOp& of(const c10::OperatorHandle& op);

  std::string name;  // with its namespace
  c10::OperatorHandle forward, backward;
  size_t arguments, outputs;
  std::vector<size_t> tensors, settings;  // positions among the arguments
  size_t dropout_p = 0, compute_dtype = 0;
  std::vector<size_t> keeps;
  std::vector<bool> saved_results;
  bool wide_gradients = false;  // X_bwd takes a wide_mask
};

// Per tensor argument: whether its gradient is asked for, and whether in fp32 although the argument
// is half precision (none where that list is empty).
struct GradientMask {
  std::vector<bool> wanted, wide;
};

class RematBackward : public torch::autograd::Node {
 public:
  explicit RematBackward(const RematOp& op) : op_(op) {}

  // Everything that exists before the compute: inside someone's checkpoint, its replay can stop
  // right here.
  void save_arguments(const std::vector<at::IValue>& arguments, const at::Tensor& seed);
  // Only what is there: a tensor saved after the compute makes a checkpoint's replay run the
  // compute. After set_history, which outputs need.
  void save_results(const std::vector<at::Tensor>& results);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;
  std::string name() const override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads,
      torch::dynamo::autograd::SwapSavedVariables& swap) override;

 private:
  std::vector<at::IValue> unpack();
  GradientMask mask() const;
  bool is_wide(size_t i) const;
  torch::autograd::variable_list trace(
      const torch::autograd::variable_list& grads,
      const torch::dynamo::autograd::SwapSavedVariables& swap);

  const RematOp& op_;
  std::vector<at::IValue> settings_;  // in the order of op_.settings
  // Tensor arguments, seed, results of forward. Absent ones are undefined.
  std::vector<torch::autograd::SavedVariable> inputs_, results_;
  bool released_ = false;
};

}  // namespace fused_remat
