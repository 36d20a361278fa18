// The elementwise half of an attention tile on the CPU: scale, masks, softmax, dropout and its
// gradient over a tile of scores [rows, cols]. Compiled once per instruction set (tile_*.cpp) and
// chosen at run time.
#pragma once

#include <cstdint>

#include "tile.h"

namespace fused_remat::cpu {

// Most keys of a tile.
constexpr int64_t kWidestTile = 256;

// One mask for one (batch, head): element (i, j) is at data + (i * stride_q + j * stride_k)
// elements.
struct MaskView {
  const void* data = nullptr;  // null = no mask
  bool is_bool = false;        // else floating, of `storage`
  Storage storage = Storage::kFloat;
  int64_t stride_q = 0, stride_k = 0;
};

// Scores of queries [i0, i0 + rows) and keys [j0, j0 + cols) of one (batch, head), row-major.
struct ScoreTile {
  void* scores;    // in: q k^T; double for fp64, else float. Rows may be written up to `stride`.
  int64_t stride;  // of scores, a multiple of the widest vector
  int64_t rows, cols, i0, j0;
  double scale;
  double softcap;       // as Attending
  int64_t low, high;    // as Band
  int64_t masked_keys;  // keys from here on are always visible
  MaskView masks[2];
  bool dropout;
  double drop_p;
  uint64_t seed;
  uint64_t index0;  // linear index of element (0, 0) of this (batch, head)
  int64_t row_elements;
};

// Gradient of the weights for the tile's (batch, head): element (i, j) at data + i * stride_q + j.
struct WeightsGradientView {
  const void* data = nullptr;  // null = none
  int64_t stride_q = 0;
  double factor = 1.0;
};

struct AttentionKernels {
  // scores <- exp(scores - running max), dropped and scaled; rescales the running sums and
  // `out` [rows, width] to the new max. -inf and 0 start `max` and `sum`.
  void (*online_softmax[2])(
      const ScoreTile&, void* max, void* sum, void* out, int64_t out_stride, int64_t width);
  // out <- out / sum, and lse <- max + log(sum); rows without a key become 0 and -inf.
  void (*finish_softmax[2])(
      const void* max, const void* sum, int64_t rows, void* out, int64_t out_stride, int64_t width,
      void* lse);
  // sums[i] += the sum over j of exp(scores - lse), before dropout; 0 where lse is -inf.
  void (*add_exponentials[2])(const ScoreTile&, const void* lse, void* sums);
  // scores <- probabilities after dropout, from the known lse and its correction; their sums before
  // dropout are added to `sums` where it is not null.
  void (*probabilities[2])(const ScoreTile&, const void* lse, const void* correction, void* sums);
  // scores <- probabilities after dropout; dprobabilities [rows, stride] <- the gradient of the
  // masked scores, or of q k^T where `of_products`.
  void (*gradient[2])(
      const ScoreTile&, const void* lse, const void* correction, const void* delta,
      const WeightsGradientView&, bool of_products, void* dprobabilities);
  // delta[i] += factor * sum over j of scores (dropped probabilities) * dweights.
  void (*add_weights_delta[2])(const ScoreTile&, const WeightsGradientView&, void* delta);
  // out[i] = row sums of a * b, rows of `width` in `storage`.
  void (*row_dots[2])(const Matrix& a, const Matrix& b, Storage storage, int64_t rows, void* out);
  // Rows between any storage and the kernels' own float or double.
  void (*load_rows[2])(const Matrix& from, Storage, int64_t rows, void* to, int64_t to_stride);
  void (*store_rows[2])(
      const void* from, int64_t from_stride, int64_t rows, const Matrix& to, Storage);
};

const AttentionKernels& attention_kernels_default();
#if defined(__x86_64__)
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();
#endif

}  // namespace fused_remat::cpu
