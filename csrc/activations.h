// The activations: value and slope of each, written once for scalars (CPU, CUDA) and for at::vec
// vectors.
//
// To add one: a struct here, its row in FUSED_REMAT_ACTIVATIONS, its ATen row in
// aten/activations.cpp and its name in fused_remat/activations.py. Sources of the formulas:
// docs/math.md, section "Activations".
#pragma once

#include <cmath>
#include <string_view>
#include <type_traits>

#if defined(__CUDACC__)
#define FUSED_REMAT_HOST_DEVICE __host__ __device__
#else
#define FUSED_REMAT_HOST_DEVICE
#endif

// X(name as the Python table spells it, struct below)
#define FUSED_REMAT_ACTIVATIONS(X) \
  X("gelu", Gelu)                  \
  X("gelu_tanh", GeluTanh)         \
  X("quick_gelu", QuickGelu)       \
  X("relu", Relu)                  \
  X("relu2", Relu2)                \
  X("leaky_relu", LeakyRelu)       \
  X("silu", Silu)                  \
  X("sigmoid", Sigmoid)            \
  X("tanh", Tanh)                  \
  X("identity", Identity)

namespace fused_remat::activations {

// Places in the table.
enum Index : int {
#define FUSED_REMAT_INDEX(name, Act) k##Act##Index,
  FUSED_REMAT_ACTIVATIONS(FUSED_REMAT_INDEX)
#undef FUSED_REMAT_INDEX
      kCount
};

// The place of a name; -1 for one that is not in the table.
inline int index_of(std::string_view activation) {
#define FUSED_REMAT_FIND(name, Act) \
  if (activation == name) return k##Act##Index;
  FUSED_REMAT_ACTIVATIONS(FUSED_REMAT_FIND)
#undef FUSED_REMAT_FIND
  return -1;
}

// The elementary functions of a number type. at::vec vectors specialise this (cpu/vector_math.h).
template <class T>
struct Math {
  static FUSED_REMAT_HOST_DEVICE inline T exp(T x) { return std::exp(x); }
  static FUSED_REMAT_HOST_DEVICE inline T erf(T x) { return std::erf(x); }
  static FUSED_REMAT_HOST_DEVICE inline T tanh(T x) { return std::tanh(x); }
  // x <= 0 ? nonpositive : otherwise, so that a NaN x takes `otherwise`.
  static FUSED_REMAT_HOST_DEVICE inline T where_nonpositive(T x, T nonpositive, T otherwise) {
    return x <= T(0) ? nonpositive : otherwise;
  }
};

// `slope` is d value / d x. Backward needs both at once and never evaluates an activation twice.
template <class T>
struct ValueAndSlope {
  T value;
  T slope;
};

template <class T>
FUSED_REMAT_HOST_DEVICE inline T sigmoid_of(T x) {
  // exp overflows to inf for x << 0 and 1 / inf is the right limit, 0.
  const T denominator = T(1) + Math<T>::exp(T(0) - x);
#if defined(__CUDA_ARCH__)
  // Within 2 ulp. The slow path of an IEEE division is a function call, and a kernel with one runs
  // its wgmma instructions one by one.
  if constexpr (std::is_same_v<T, float>) return __fdividef(1.0f, denominator);
#endif
  return T(1) / denominator;
}

struct Gelu {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    const T cdf = T(0.5) * (T(1) + Math<T>::erf(x * T(0.70710678118654752440)));
    const T pdf = T(0.39894228040143267794) * Math<T>::exp(T(-0.5) * x * x);
    return {x * cdf, cdf + x * pdf};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    return T(0.5) * x * (T(1) + Math<T>::erf(x * T(0.70710678118654752440)));
  }
};

struct GeluTanh {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T tanh_term(T x) {
    return Math<T>::tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x));
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    const T t = tanh_term(x);
    const T inner = T(0.79788456080286535588) * (T(1) + T(0.134145) * x * x);
    const T half = T(0.5) * (T(1) + t);
    return {x * half, half + T(0.5) * x * (T(1) - t * t) * inner};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    return T(0.5) * x * (T(1) + tanh_term(x));
  }
};

struct QuickGelu {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    const T s = sigmoid_of(T(1.702) * x);
    return {x * s, s + T(1.702) * x * s * (T(1) - s)};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    return x * sigmoid_of(T(1.702) * x);
  }
};

struct Relu {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    return {value(x), Math<T>::where_nonpositive(x, T(0), T(1))};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    return Math<T>::where_nonpositive(x, T(0), x);
  }
};

struct Relu2 {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    const T r = Relu::value(x);
    return {r * r, T(2) * r};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    const T r = Relu::value(x);
    return r * r;
  }
};

struct LeakyRelu {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    return {value(x), Math<T>::where_nonpositive(x, T(0.01), T(1))};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    return Math<T>::where_nonpositive(x, T(0.01) * x, x);
  }
};

struct Silu {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    const T s = sigmoid_of(x);
    return {x * s, s * (T(1) + x * (T(1) - s))};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    return x * sigmoid_of(x);
  }
};

struct Sigmoid {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    const T s = sigmoid_of(x);
    return {s, s * (T(1) - s)};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    return sigmoid_of(x);
  }
};

struct Tanh {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    const T t = Math<T>::tanh(x);
    return {t, T(1) - t * t};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    return Math<T>::tanh(x);
  }
};

struct Identity {
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline ValueAndSlope<T> both(T x) {
    return {x, T(1)};
  }
  template <class T>
  static FUSED_REMAT_HOST_DEVICE inline T value(T x) {
    return x;
  }
};

}  // namespace fused_remat::activations
