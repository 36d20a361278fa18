// The activations composed from ATen, for any device and dtype: rows of the same names as
// activations.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fused_remat::aten {

struct Activation {
  // value <- act(pre); the two may be one tensor.
  void (*value)(const at::Tensor& pre, at::Tensor value);
  // dpre <- dvalue * act'(pre), given value = act(pre). dpre may be `dvalue` or `pre`, and `pre`
  // may be overwritten.
  void (*gradient)(
      const at::Tensor& pre, const at::Tensor& value, const at::Tensor& dvalue, at::Tensor dpre);
};

// Raises where no activation of that name exists, naming those that do.
const Activation& activation(const std::string& name);

// 0 for a dropped element and 1 / (1 - p) for a kept one, [rows, features] in `options`: the mask
// of rows row0.. and features feature0.. of a hidden [M, hidden_features].
at::Tensor dropout_scales(
    const at::Tensor& seed, double dropout_p, int64_t row0, int64_t rows, int64_t feature0,
    int64_t features, int64_t hidden_features, const at::TensorOptions& options);

}  // namespace fused_remat::aten
