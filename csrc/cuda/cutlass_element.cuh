// CUTLASS's names of our element types.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "cutlass_stage1_epilogue.cuh"

namespace fused_remat::cuda::stage1 {

template <class T>
using CutlassElement =
    std::conditional_t<std::is_same_v<T, c10::Half>, cutlass::half_t, cutlass::bfloat16_t>;

}  // namespace fused_remat::cuda::stage1
