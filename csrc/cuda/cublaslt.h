// Products with an activation in the library's epilogue, which ATen has no op for.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "platform.h"

namespace fused_remat::cuda {

// With z = a b + bias, rounded to the dtype of the matrices only where it is stored. The GELU is
// the tanh form.
enum class LtEpilogue {
  kGelu,          // out <- gelu(z)
  kGeluAux,       // the same, aux <- z
  kGeluGradient,  // out <- a b gelu'(aux); no bias
};

// Matrices are fp32, fp16 or bf16, one dtype; dims are dense in rows or, for a and b, in columns.
struct LtProduct {
  at::Tensor a;                    // [M, K]
  at::Tensor b;                    // [K, N]
  std::optional<at::Tensor> bias;  // [N]
  at::Tensor aux;                  // [M, N]; undefined for kGelu
  at::Tensor out;                  // [M, N], apart from aux
};

// Why cuBLASLt cannot make the product with this epilogue; nullptr = it can. On the current device,
// whose library is asked for an algorithm once for each kind of product.
const char* why_not_lt(const LtProduct&, LtEpilogue);

// For what why_not_lt lets through.
void lt_multiply(const LtProduct&, LtEpilogue, Stream);

}  // namespace fused_remat::cuda
