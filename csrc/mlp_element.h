// One hidden value of an MLP and its gradients, for scalars (CPU, CUDA) and at::vec vectors.
// Formulas: docs/math.md.
//
// Pre-activations come in rounded to the compute dtype; everything here is fp32 (fp64 for fp64).
#pragma once

#include "activations.h"

namespace fused_remat::mlp_element {

// `scale` is 1 / (1 - p) for a kept element, 0 for a dropped one, 1 without dropout. A dropped
// infinity is 0, not NaN.
template <class T>
FUSED_REMAT_HOST_DEVICE inline T dropped(T value, T scale) {
  return activations::Math<T>::where_nonpositive(scale, T(0), value * scale);
}

// `gate` is not read in a plain layer.
template <class Act, class T>
FUSED_REMAT_HOST_DEVICE inline T forward(T up, T gate, bool gated) {
  return gated ? Act::value(gate) * up : Act::value(up);
}
template <class Act, class T>
FUSED_REMAT_HOST_DEVICE inline T forward(T up, T gate, bool gated, T scale) {
  return dropped(forward<Act>(up, gate, gated), scale);
}

template <class T>
struct Gradients {
  T hidden;
  T dup;
  T dgate;  // 0 in a plain layer
};

template <class Act, class T>
FUSED_REMAT_HOST_DEVICE inline Gradients<T> backward(T up, T gate, T dhidden, bool gated) {
  if (!gated) {
    const auto act = Act::both(up);
    return {act.value, dhidden * act.slope, T(0)};
  }
  const auto act = Act::both(gate);
  return {act.value * up, dhidden * act.value, dhidden * up * act.slope};
}
// `dhidden` is the gradient of what dropout made.
template <class Act, class T>
FUSED_REMAT_HOST_DEVICE inline Gradients<T> backward(T up, T gate, T dhidden, bool gated, T scale) {
  Gradients<T> made = backward<Act>(up, gate, dropped(dhidden, scale), gated);
  made.hidden = dropped(made.hidden, scale);
  return made;
}

}  // namespace fused_remat::mlp_element
