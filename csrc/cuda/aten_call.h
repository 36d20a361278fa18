// A call of one of torch's operators by name. Signatures differ between versions of torch:
// arguments are given by name, those left out take their defaults.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <initializer_list>
#include <optional>
#include <vector>

namespace fused_remat::cuda {

class AtenCall {
 public:
  // `name` with its namespace. Raises NotImplementedError where this torch has no such operator.
  explicit AtenCall(const char* name);

  // An argument, by the names that versions of torch have for it. Raises NotImplementedError where
  // none of them is there.
  AtenCall& with(std::initializer_list<const char*> names, c10::IValue value);
  AtenCall& with(const char* name, c10::IValue value) { return with({name}, std::move(value)); }

  // The results, computed below autograd. Raises NotImplementedError where the operator asks for an
  // argument that it was not given.
  std::vector<c10::IValue> operator()();

 private:
  const c10::OperatorHandle op_;
  std::vector<std::optional<c10::IValue>> values_;
};

}  // namespace fused_remat::cuda
