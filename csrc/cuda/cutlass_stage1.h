// Stage 1 of the MLP's backward as one GEMM: dhidden = dy w_down is never written; the epilogue
// turns the pre-activations of the tile into their gradients and hidden values.
//
// plain:  hidden = act(up),         dup = dhidden act'(up)
// gated:  hidden = act(gate) up,    dup = dhidden act(gate),  dgate = dhidden up act'(gate)
// Dropout acts on hidden, so on dhidden too. Formulas: mlp_element.h.
//
// Built where CUTLASS's headers are: cutlass_sm80_stage1.cu (mma.sync; 8.0, 8.6, 8.7, 8.9) and
// cutlass_sm90a_stage1.cu (TMA and wgmma; 9.0).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>

#include "platform.h"

namespace fused_remat::cuda {

// Rows of contiguous features, `stride` elements apart.
template <class Pointer>
struct RowMajor {
  Pointer data = nullptr;
  int64_t stride = 0;
};

// Pointers are the device's. An output may be an input of the same name's place (dup = up, dgate =
// gate, hidden = up or gate): then with the same pointer and stride. Every other pair is disjoint.
struct Stage1Gemm {
  Dtype dtype;  // of all matrices: kHalf or kBFloat16
  int64_t rows;
  int64_t features;
  int64_t d_out;
  RowMajor<const void*> dy;      // [rows, d_out]
  RowMajor<const void*> w_down;  // [d_out, features]
  RowMajor<const void*> up;      // [rows, features], as the others below
  RowMajor<const void*> gate;    // nullptr = plain
  RowMajor<void*> hidden;
  RowMajor<void*> dup;
  RowMajor<void*> dgate;  // gated only
  int activation;         // place in FUSED_REMAT_ACTIVATIONS

  // Dropout (philox.h); nullptr = none. The tile is cut out of [M, hidden_features] at (row0,
  // feature0).
  const int64_t* seed = nullptr;
  uint64_t drop_threshold = 0;
  float keep_scale = 1.0f;  // 1 / (1 - p)
  int64_t row0 = 0;
  int64_t feature0 = 0;
  int64_t hidden_features = 0;

  bool gated() const { return gate.data != nullptr; }
};

enum class Stage1Kernel { kNone, kSm80, kSm90a };

// The kernel that this library holds for devices of a compute capability (80 = 8.0).
inline Stage1Kernel stage1_kernel(int capability) {
#if defined(FUSED_REMAT_WITH_CUTLASS_SM90A)
  // 9.0a code runs on 9.0 alone.
  if (capability == 90) return Stage1Kernel::kSm90a;
#endif
#if defined(FUSED_REMAT_WITH_CUTLASS_SM80)
  if (capability >= 80 && capability < 90) return Stage1Kernel::kSm80;
#endif
  return Stage1Kernel::kNone;
}

// Why the kernels cannot take a GEMM; nullptr = they can. Rows may be any number, 0 included.
inline const char* why_not_stage1_gemm(const Stage1Gemm& gemm) {
  constexpr int64_t kVector = 8;  // elements of 16 bytes, of TMA boxes and of vector accesses
  // Tiles round extents up; both kernels count in int32.
  constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max() - 1024;
  // The grid of the sm_80 kernel has 8 tiles of 128 features per y.
  constexpr int64_t kMaxFeatures = 65535LL * 8 * 128;
  if (gemm.dtype != Dtype::kHalf && gemm.dtype != Dtype::kBFloat16)
    return "the dtype is neither float16 nor bfloat16";
  if (gemm.features % kVector != 0) return "the number of features is no multiple of 8";
  if (gemm.d_out % kVector != 0) return "the output width is no multiple of 8";
  if (gemm.d_out == 0) return "the output width is 0";
  if (gemm.rows > kMaxExtent || gemm.d_out > kMaxExtent || gemm.features > kMaxFeatures)
    return "an extent does not fit in 32 bits";
  // A row that overlaps the next, as of an expanded tensor, is no row of a matrix to a library.
  const auto overlap = [](const auto& matrix, int64_t count, int64_t width) {
    return matrix.data != nullptr && count > 1 && matrix.stride < width;
  };
  if (overlap(gemm.dy, gemm.rows, gemm.d_out) || overlap(gemm.w_down, gemm.d_out, gemm.features))
    return "rows of dy or w_down overlap";
  for (const RowMajor<const void*>& in : {gemm.up, gemm.gate})
    if (overlap(in, gemm.rows, gemm.features)) return "rows of the pre-activations overlap";
  for (const RowMajor<void*>& out : {gemm.hidden, gemm.dup, gemm.dgate})
    if (overlap(out, gemm.rows, gemm.features)) return "rows of an output overlap";
  const auto misaligned = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 != 0 || stride % kVector != 0;
  };
  for (const RowMajor<const void*>& in : {gemm.dy, gemm.w_down, gemm.up, gemm.gate})
    if (misaligned(in.data, in.stride)) return "rows of an input do not start at 16 bytes";
  for (const RowMajor<void*>& out : {gemm.hidden, gemm.dup, gemm.dgate})
    if (misaligned(out.data, out.stride)) return "rows of an output do not start at 16 bytes";
  return nullptr;
}

// For what the two functions above allow; std::invalid_argument otherwise, std::runtime_error with
// CUTLASS's or CUDA's reason where the launch fails. Needs no workspace, never waits, may be
// captured in a CUDA graph. Same inputs, same bits.
void cutlass_stage1_sm80(const Stage1Gemm&, Stream);
void cutlass_stage1_sm90a(const Stage1Gemm&, Stream);

// The dynamic shared memory of their blocks.
int64_t cutlass_stage1_sm80_shared_bytes();
int64_t cutlass_stage1_sm90a_shared_bytes();

}  // namespace fused_remat::cuda
