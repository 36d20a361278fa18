// What the epilogues of both architectures do with 8 neighbouring features of one row.
#pragma once

#include <type_traits>

#include "../mlp_element.h"
#include "activation_switch.cuh"
#include "cutlass_stage1.h"
#include "dropout.cuh"
#include "vectors.cuh"

namespace fused_remat::cuda::stage1 {

constexpr int kVector = 8;  // two-byte elements of one 16-byte access

// The kernels' parameters: the problem without its GEMM.
struct EpilogueParams {
  RowMajor<const void*> up, gate;
  RowMajor<void*> hidden, dup, dgate;
  int activation;
  Dropout dropout;
};

inline EpilogueParams epilogue_params(const Stage1Gemm& gemm) {
  const Dropout dropout{gemm.seed, gemm.drop_threshold, gemm.keep_scale,
                        gemm.row0, gemm.feature0,       gemm.hidden_features};
  return {gemm.up, gemm.gate, gemm.hidden, gemm.dup, gemm.dgate, gemm.activation, dropout};
}

// The pre-activations of one vector; a plain layer has no gate.
template <class T, bool kGated>
struct Pre {
  Vector<T> up;
  Vector<T> gate;
};

template <class T, bool kGated>
__device__ __forceinline__ Pre<T, kGated> load_pre(
    const EpilogueParams& params, int64_t row, int64_t feature) {
  const auto load = [&](const RowMajor<const void*>& from) {
    return load_vector<kVector>(static_cast<const T*>(from.data) + row * from.stride + feature);
  };
  Pre<T, kGated> pre;
  pre.up = load(params.up);
  if constexpr (kGated) pre.gate = load(params.gate);
  return pre;
}

// nvcc stores 16 bytes at once only if they are four words and the address is one of such vectors.
using Pairs = Vector<uint32_t>;
template <class T>
__device__ __forceinline__ Pairs rounded(const float (&values)[kVector]) {
  Pairs pairs;
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) pairs.at[i] = pack<T>(values[2 * i], values[2 * i + 1]);
  return pairs;
}

// Writes hidden and the gradients of the vector. In place is safe: every (row, feature) belongs to
// one thread, which comes here once for it and has read its pre-activations (`pre`) by then.
template <class T, bool kGated>
__device__ __forceinline__ void finish(
    const EpilogueParams& params, int64_t row, int64_t feature, const float (&dhidden)[kVector],
    const Pre<T, kGated>& pre) {
  const uint64_t seed =
      params.dropout.seed == nullptr ? 0 : static_cast<uint64_t>(*params.dropout.seed);
  float scale[kVector];
  dropout_scales(params.dropout, seed, row, feature, scale);
  Pairs hidden, dup, dgate;
  with_activation(params.activation, [&](auto act) {
    float values[3][kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float gate = kGated ? static_cast<float>(pre.gate.at[i]) : 0.0f;
      const auto made = mlp_element::backward<decltype(act)>(
          static_cast<float>(pre.up.at[i]), gate, dhidden[i], kGated, scale[i]);
      values[0][i] = made.hidden;
      values[1][i] = made.dup;
      values[2][i] = made.dgate;
    }
    hidden = rounded<T>(values[0]);
    dup = rounded<T>(values[1]);
    if constexpr (kGated) dgate = rounded<T>(values[2]);
  });
  const auto store = [&](const RowMajor<void*>& to, const Pairs& values) {
    static_cast<Pairs*>(to.data)[(row * to.stride + feature) / kVector] = values;
  };
  store(params.hidden, hidden);
  store(params.dup, dup);
  if constexpr (kGated) store(params.dgate, dgate);
}

}  // namespace fused_remat::cuda::stage1
