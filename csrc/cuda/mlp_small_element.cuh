// The elementwise part of narrow MLPs, on fragments of results: pre-activations to hidden values
// and gradients.
#pragma once

#include "mlp_small_tiles.cuh"

namespace fused_remat::cuda::small {

// Where element [j][i] of a Pair lies in [M, F]: token rows and hidden features of a product with
// features in its columns, or of one with tokens there.
struct FeaturesInColumns {
  int64_t row0, feature0;
  __device__ __forceinline__ int64_t row(int, int i) const {
    return row0 + lane_of() / 4 + i / 2 * 8;
  }
  // Relative to feature0.
  __device__ __forceinline__ int feature(int j, int i) const {
    return j * 8 + lane_of() % 4 * 2 + i % 2;
  }
};
struct FeaturesInRows {
  int64_t row0, feature0;
  __device__ __forceinline__ int64_t row(int j, int i) const {
    return row0 + j * 8 + lane_of() % 4 * 2 + i % 2;
  }
  __device__ __forceinline__ int feature(int, int i) const { return lane_of() / 4 + i / 2 * 8; }
};

// up, gate, without their biases -> pre-activations, rounded to the compute dtype as a projection
// of its own would leave them.
template <class T, bool kGated, class Place>
__device__ __forceinline__ void add_biases(
    Pair& up, Pair& gate, const Place& place, const float* b_up, const float* b_gate) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int feature = place.feature(j, i);
      up[j][i] = static_cast<float>(T(up[j][i] + b_up[feature]));
      if constexpr (kGated) gate[j][i] = static_cast<float>(T(gate[j][i] + b_gate[feature]));
    }
}

// up -> hidden. Padding features and rows are 0: they must not spread a NaN or an infinity.
template <class T, bool kGated, class Place>
__device__ __forceinline__ void activate(
    Pair& up, Pair& gate, int activation, DropScales& dropout, const Place& place,
    const float* b_up, const float* b_gate, int64_t rows, int64_t features) {
  add_biases<T, kGated>(up, gate, place, b_up, b_gate);
  with_activation(activation, [&](auto act) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      float& value = up[k / 4][k % 4];
      value =
          mlp_element::forward<decltype(act)>(value, kGated ? gate[k / 4][k % 4] : 0.0f, kGated);
    }
  });
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = place.row(j, i), feature = place.feature0 + place.feature(j, i);
      if (dropout.on()) up[j][i] = mlp_element::dropped(up[j][i], dropout(row, feature));
      if (row >= rows || feature >= features) up[j][i] = 0.0f;
    }
}

// up, gate, dhidden -> hidden, dgate, dup, each in the place of the one above it.
template <class T, bool kGated, class Place>
__device__ __forceinline__ void differentiate(
    Pair& up, Pair& gate, Pair& dhidden, int activation, DropScales& dropout, const Place& place,
    const float* b_up, const float* b_gate, int64_t rows, int64_t features) {
  add_biases<T, kGated>(up, gate, place, b_up, b_gate);
  Pair scale;
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = place.row(j, i), feature = place.feature0 + place.feature(j, i);
      scale[j][i] = row >= rows || feature >= features ? 0.0f
                    : dropout.on()                     ? dropout(row, feature)
                                                       : 1.0f;
    }
  with_activation(activation, [&](auto act) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int j = k / 4, i = k % 4;
      const auto made = mlp_element::backward<decltype(act)>(
          up[j][i], kGated ? gate[j][i] : 0.0f, dhidden[j][i], kGated, scale[j][i]);
      // What is 0 times an infinite slope is 0 in padding.
      const bool inside = place.row(j, i) < rows && place.feature0 + place.feature(j, i) < features;
      up[j][i] = made.hidden;
      dhidden[j][i] = inside ? made.dup : 0.0f;
      if constexpr (kGated) gate[j][i] = inside ? made.dgate : 0.0f;
    }
  });
}

}  // namespace fused_remat::cuda::small
