#include "activations.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <unordered_map>

#include "../activations.h"
#include "../philox.h"

namespace fused_remat::aten {

using at::Tensor;

namespace {

constexpr double kQuick = 1.702, kLeak = 0.01;

struct Gelu {
  static constexpr const char* kApproximate = "none";
};
struct GeluTanh {
  static constexpr const char* kApproximate = "tanh";
};

template <class Kind>
Activation gelu() {
  return {
      [](const Tensor& pre, Tensor value) { at::gelu_out(value, pre, Kind::kApproximate); },
      [](const Tensor& pre, const Tensor&, const Tensor& dvalue, Tensor dpre) {
        at::gelu_backward_out(dpre, dvalue, pre, Kind::kApproximate);
      }};
}

// x sigmoid(1.702 x) = silu(1.702 x) / 1.702, and its slope is silu'(1.702 x).
Activation quick_gelu() {
  return {
      [](const Tensor& pre, Tensor value) {
        at::silu_(value.copy_(pre).mul_(kQuick)).div_(kQuick);
      },
      [](const Tensor& pre, const Tensor&, const Tensor& dvalue, Tensor dpre) {
        Tensor scaled = pre;
        at::silu_backward_out(dpre, dvalue, scaled.mul_(kQuick));
      }};
}

Activation relu() {
  return {
      [](const Tensor& pre, Tensor value) { at::relu_out(value, pre); },
      [](const Tensor& pre, const Tensor&, const Tensor& dvalue, Tensor dpre) {
        at::threshold_backward_out(dpre, dvalue, pre, 0);
      }};
}

Activation relu2() {
  return {
      [](const Tensor& pre, Tensor value) { at::relu_out(value, pre).square_(); },
      [](const Tensor& pre, const Tensor&, const Tensor& dvalue, Tensor dpre) {
        Tensor positive = pre;
        at::mul_out(dpre, positive.relu_(), dvalue).mul_(2);
      }};
}

Activation leaky_relu() {
  return {
      [](const Tensor& pre, Tensor value) { at::leaky_relu_out(value, pre, kLeak); },
      [](const Tensor& pre, const Tensor&, const Tensor& dvalue, Tensor dpre) {
        at::leaky_relu_backward_out(dpre, dvalue, pre, kLeak, /*self_is_result=*/false);
      }};
}

Activation silu() {
  return {
      [](const Tensor& pre, Tensor value) { at::silu_out(value, pre); },
      [](const Tensor& pre, const Tensor&, const Tensor& dvalue, Tensor dpre) {
        at::silu_backward_out(dpre, dvalue, pre);
      }};
}

Activation sigmoid() {
  return {
      [](const Tensor& pre, Tensor value) { at::sigmoid_out(value, pre); },
      [](const Tensor&, const Tensor& value, const Tensor& dvalue, Tensor dpre) {
        at::sigmoid_backward_out(dpre, dvalue, value);
      }};
}

Activation tanh() {
  return {
      [](const Tensor& pre, Tensor value) { at::tanh_out(value, pre); },
      [](const Tensor&, const Tensor& value, const Tensor& dvalue, Tensor dpre) {
        at::tanh_backward_out(dpre, dvalue, value);
      }};
}

Activation identity() {
  return {
      [](const Tensor& pre, Tensor value) { value.copy_(pre); },
      [](const Tensor&, const Tensor&, const Tensor& dvalue, Tensor dpre) { dpre.copy_(dvalue); }};
}

constexpr int64_t kLow32 = 0xFFFFFFFF;

// philox.h on int64 tensors, whose products wrap modulo 2^64 and so keep both halves of a 32 x 32
// product.
std::array<Tensor, 4> philox_words(const Tensor& seed, const Tensor& counter) {
  Tensor key0 = seed.bitwise_and(kLow32), key1 = seed.__rshift__(32).bitwise_and(kLow32);
  std::array<Tensor, 4> w{
      counter.bitwise_and(kLow32), counter.__rshift__(32).bitwise_and(kLow32),
      at::zeros_like(counter), at::zeros_like(counter)};
  for (int round = 0; round < philox::kRounds; ++round) {
    const Tensor product0 = w[0] * static_cast<int64_t>(philox::kMultiplier0);
    const Tensor product1 = w[2] * static_cast<int64_t>(philox::kMultiplier1);
    w = {
        product1.__rshift__(32).bitwise_and_(kLow32).bitwise_xor_(w[1]).bitwise_xor_(key0),
        product1.bitwise_and(kLow32),
        product0.__rshift__(32).bitwise_and_(kLow32).bitwise_xor_(w[3]).bitwise_xor_(key1),
        product0.bitwise_and(kLow32)};
    key0 = (key0 + static_cast<int64_t>(philox::kWeyl0)).bitwise_and_(kLow32);
    key1 = (key1 + static_cast<int64_t>(philox::kWeyl1)).bitwise_and_(kLow32);
  }
  return w;
}

// The 32-bit word of every element of the tile, [rows, features].
Tensor mask_words(
    const Tensor& seed, int64_t row0, int64_t rows, int64_t feature0, int64_t features,
    int64_t hidden_features) {
  const auto integers = at::TensorOptions().dtype(at::kLong).device(seed.device());
  const Tensor row_start =
      at::arange(row0, row0 + rows, integers).mul_(hidden_features).add_(feature0).unsqueeze(1);
  if (hidden_features % 4 == 0 && feature0 % 4 == 0) {
    // Every row starts on a counter of its own: a call of the generator serves four elements.
    const int64_t counters = (features + 3) / 4;
    const Tensor counter = row_start.__rshift__(2) + at::arange(counters, integers);
    return at::stack(philox_words(seed, counter), -1)
        .view({rows, 4 * counters})
        .narrow(1, 0, features);
  }
  const Tensor index = row_start + at::arange(features, integers);
  const auto words = philox_words(seed, index.__rshift__(2));
  const Tensor lane = index.bitwise_and(3);
  Tensor word = words[3];
  for (const int64_t l : {0, 1, 2}) word = at::where(lane == l, words[l], word);
  return word;
}

}  // namespace

const Activation& activation(const std::string& name) {
  static const std::unordered_map<std::string, Activation> table{
      {"gelu", gelu<Gelu>()},
      {"gelu_tanh", gelu<GeluTanh>()},
      {"quick_gelu", quick_gelu()},
      {"relu", relu()},
      {"relu2", relu2()},
      {"leaky_relu", leaky_relu()},
      {"silu", silu()},
      {"sigmoid", sigmoid()},
      {"tanh", tanh()},
      {"identity", identity()}};
  const auto row = table.find(name);
#define FUSED_REMAT_NAME(name, Act) " " name
  TORCH_CHECK_VALUE(
      row != table.end(), "activation must be one of", FUSED_REMAT_ACTIVATIONS(FUSED_REMAT_NAME),
      "; got ", name);
#undef FUSED_REMAT_NAME
  return row->second;
}

Tensor dropout_scales(
    const Tensor& seed, double dropout_p, int64_t row0, int64_t rows, int64_t feature0,
    int64_t features, int64_t hidden_features, const at::TensorOptions& options) {
  const Tensor word = mask_words(seed, row0, rows, feature0, features, hidden_features);
  const auto threshold = static_cast<int64_t>(philox::drop_threshold(dropout_p));
  return word.ge(threshold).to(options).mul_(1.0 / (1.0 - dropout_p));
}

}  // namespace fused_remat::aten
