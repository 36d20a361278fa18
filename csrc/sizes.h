// Arithmetic on sizes and kinds of dtypes, for the host code of every level. Knows neither ATen nor
// CUDA.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fused_remat {

// For a >= 0 and b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

constexpr bool is_half(at::ScalarType dtype) {
  return dtype == at::ScalarType::BFloat16 || dtype == at::ScalarType::Half;
}

}  // namespace fused_remat
