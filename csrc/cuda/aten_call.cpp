#include "aten_call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/version.h>

namespace fused_remat::cuda {
namespace {

c10::OperatorHandle found(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.has_value(), "attention: torch ", TORCH_VERSION, " has no operator ", name,
      "; switch that kernel off with torch.backends.cuda.enable_*_sdp(False)");
  return *op;
}

}  // namespace

AtenCall::AtenCall(const char* name) : op_(found(name)), values_(op_.schema().arguments().size()) {}

AtenCall& AtenCall::with(std::initializer_list<const char*> names, c10::IValue value) {
  for (const char* name : names) {
    const auto index = op_.schema().argumentIndexWithName(name);
    if (!index) continue;
    values_[*index] = std::move(value);
    return *this;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "attention: ", op_.schema(), " of torch ", TORCH_VERSION, " has no argument ",
      *names.begin(), "; switch that kernel off with torch.backends.cuda.enable_*_sdp(False)");
}

std::vector<c10::IValue> AtenCall::operator()() {
  torch::jit::Stack stack;
  const auto& arguments = op_.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (values_[i]) {
      stack.push_back(*values_[i]);
    } else {
      TORCH_CHECK_NOT_IMPLEMENTED(
          arguments[i].default_value().has_value(), "attention: ", op_.schema(), " of torch ",
          TORCH_VERSION, " asks for ", arguments[i].name(),
          "; switch that kernel off with torch.backends.cuda.enable_*_sdp(False)");
      stack.push_back(*arguments[i].default_value());
    }
  }
  const at::AutoDispatchBelowAutograd guard;
  op_.callBoxed(stack);
  return stack;
}

}  // namespace fused_remat::cuda
