// Kernels take the activation at run time: one switch per vector of elements costs nothing beside
// their memory traffic, and one kernel serves all activations.
#pragma once

#include "../activations.h"
#include "platform.h"

namespace fused_remat::cuda {

// f(Act{}) with the activation at that place of FUSED_REMAT_ACTIVATIONS.
template <class F>
__device__ __forceinline__ void with_activation(int index, F&& f) {
  using namespace activations;
  switch (index) {
#define FUSED_REMAT_CASE(name, Act) \
  case k##Act##Index:               \
    return f(Act{});
    FUSED_REMAT_ACTIVATIONS(FUSED_REMAT_CASE)
#undef FUSED_REMAT_CASE
  }
}

}  // namespace fused_remat::cuda
