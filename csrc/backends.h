// The level-3 backends: every op of that level exists once per name, with the same schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <string>

namespace fused_remat {

// aten and cpp are implemented in this library, cuda in one of its own (csrc/cuda), triton in
// Python (fused_remat/triton).
constexpr const char* kBackends[] = {"aten", "cpp", "cuda", "triton"};

// The level-3 op of that backend, ready to be called.
template <class Signature>
auto level3(const char* op, const std::string& backend) {
  const std::string name = std::string("fused_remat::") + op + "_" + backend;
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Signature>();
}

// An undefined tensor as a schema spells it.
inline std::optional<at::Tensor> or_none(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

// Only the public ops are differentiable; differentiating an inner one is an error, never zeros.
inline void not_differentiable(torch::Library& m, std::initializer_list<const char*> level3_ops) {
  for (const char* op : level3_ops)
    for (const std::string backend : kBackends)
      m.impl(
          (std::string(op) + "_" + backend).c_str(),
          torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fused_remat
