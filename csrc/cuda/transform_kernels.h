// What norm.cu and heads.cu launch: norms of token rows, norms and rotations of heads. Strides are
// in elements. What is computed: csrc/norm.h, csrc/head_transform.h.
#pragma once

#include <cstdint>

#include "platform.h"

namespace fused_remat::cuda {

// A parameter of a norm, of any dtype; absent where `data` is null.
struct Parameter {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat;
  int64_t stride = 0;
};

struct Rows {  // [n, D]
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat;
  int64_t row = 0, feature = 0;
};

struct RowNorm {
  bool layer_norm;         // else rms_norm
  Parameter weight, bias;  // [D]
  double eps;
  int64_t rows, width;
};

// out <- norm(rows) rounded to `compute`; in fp64 where that is `compute`, else in fp32.
void normalize_rows(
    const Rows& rows, const RowNorm&, Dtype compute, const Rows& out, Stream stream);

// Rows of one partial sum of the parameters' gradients.
constexpr int64_t kNormSumRows = 128;
constexpr int64_t kNormStatistics = 4;

struct RowNormGradients {
  Rows drows;  // may be `dnormalized`; absent where not wanted
  // Scratch in the dtype of dnormalized. [kNormStatistics, n]; wanted with any partial sum.
  void* statistics = nullptr;
  // [ceil(n / kNormSumRows), D], written; absent where not wanted.
  void *partial_weight = nullptr, *partial_bias = nullptr;
};

// dnormalized in fp32 or fp64, which is what everything is computed in.
void normalize_rows_backward(
    const Rows& dnormalized, const Rows& rows, const RowNorm&, const RowNormGradients&,
    Stream stream);

struct Heads {  // [B, H, L, E], dense along E
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat;
  int64_t batch = 0, head = 0, length = 0;
};

struct Angles {  // [B, L, R], dense along R; stride 0 along B where batches share them
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat;
  int64_t batch = 0, length = 0;
};

struct HeadsCall {
  int64_t batches, heads, length, width, rotary;  // B, H, L, E, R
  bool interleaved;
  Parameter norm_weight;  // [E], dense; absent: no norm
  double eps;
  Angles cos, sin;  // absent where R is 0; of one dtype
};

// Widest head of that dtype that the kernels take.
int64_t widest_head(Dtype dtype);

// Whether the kernels take angles of that dtype beside heads (backward without a norm: gradients of
// heads) of that dtype. They do where both are the same or angles are in the accumulation dtype.
bool takes_angles(Dtype heads, Dtype angles);

void transform_heads(const Heads& heads, const HeadsCall&, Stream stream);

// Rows [B L H] of one partial sum of the norm weight's gradient.
constexpr int64_t kHeadSumRows = 128;

// dheads in the accumulation dtype of raw. raw is absent where there is no norm. `partial`
// [ceil(B L H / kHeadSumRows), E] in the dtype of dheads, written; absent where not wanted.
void transform_heads_backward(
    const Heads& dheads, const Heads& raw, const HeadsCall&, void* partial, Stream stream);

}  // namespace fused_remat::cuda
