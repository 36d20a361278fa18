// Stands in for the CUTLASS GEMMs of stage 1, which no host compiler takes: what cutlass_stage1.h
// promises, one element at a time. It proves the code around the kernels, not the kernels.
#include "cutlass_stage1.h"

#include <utility>

#include "../mlp_element.h"
#include "activation_switch.cuh"
#include "dropout.cuh"

namespace fused_remat::cuda {
namespace {

template <class T>
float read(const RowMajor<const void*>& from, int64_t row, int64_t col) {
  return static_cast<const T*>(from.data)[row * from.stride + col];
}
template <class T>
void write(const RowMajor<void*>& to, int64_t row, int64_t col, float value) {
  static_cast<T*>(to.data)[row * to.stride + col] = value;
}

template <class T>
void element(const Stage1Gemm& gemm, int64_t row, int64_t feature) {
  double dhidden = 0;
  for (int64_t k = 0; k < gemm.d_out; ++k)
    dhidden += static_cast<double>(read<T>(gemm.dy, row, k)) * read<T>(gemm.w_down, k, feature);
  const Dropout dropout{gemm.seed, gemm.drop_threshold, gemm.keep_scale,
                        gemm.row0, gemm.feature0,       gemm.hidden_features};
  float scale[1];
  dropout_scales(
      dropout, gemm.seed == nullptr ? 0 : static_cast<uint64_t>(*gemm.seed), row, feature, scale);
  const float up = read<T>(gemm.up, row, feature);
  const float gate = gemm.gated() ? read<T>(gemm.gate, row, feature) : 0.0f;
  with_activation(gemm.activation, [&](auto act) {
    const auto made = mlp_element::backward<decltype(act)>(
        up, gate, static_cast<float>(dhidden), gemm.gated(), scale[0]);
    write<T>(gemm.hidden, row, feature, made.hidden);
    write<T>(gemm.dup, row, feature, made.dup);
    if (gemm.gated()) write<T>(gemm.dgate, row, feature, made.dgate);
  });
}

void every_element(const Stage1Gemm& gemm) {
  if (const char* reason = why_not_stage1_gemm(gemm)) throw std::invalid_argument(reason);
  for (int64_t row = 0; row < gemm.rows; ++row)
    for (int64_t feature = 0; feature < gemm.features; ++feature)
      gemm.dtype == Dtype::kHalf ? element<c10::Half>(gemm, row, feature)
                                 : element<c10::BFloat16>(gemm, row, feature);
}

int calls_of_sm80 = 0, calls_of_sm90a = 0;

}  // namespace

void cutlass_stage1_sm80(const Stage1Gemm& gemm, Stream) {
  ++calls_of_sm80;
  every_element(gemm);
}

void cutlass_stage1_sm90a(const Stage1Gemm& gemm, Stream) {
  ++calls_of_sm90a;
  every_element(gemm);
}

}  // namespace fused_remat::cuda

// How often each was called since the last question.
extern "C" __attribute__((visibility("default"))) int simt_cutlass_calls(bool sm90a) {
  using namespace fused_remat::cuda;
  return std::exchange(sm90a ? calls_of_sm90a : calls_of_sm80, 0);
}
