// What torch's attention kernels allocate, read from their sources, and the pieces that keep it
// within the scratch bytes. A calculation: the caching allocator may round up further.
#include <algorithm>
#include <cmath>

#include "../sizes.h"
#include "attention_routes.h"

namespace fused_remat::cuda {
namespace {

// What the caching allocator makes of a request.
int64_t allocated(int64_t bytes) { return round_up(bytes, 512); }

int64_t heads_per_kv(const AttentionFacts& f) { return f.heads / std::max<int64_t>(f.kv_heads, 1); }

// Elements of [samples, heads, length, width] for a piece.
struct PieceSizes {
  PieceSizes(const AttentionFacts& f, const Piece& p, int64_t heads)
      : q(p.batch * heads * f.length_q * f.width),
        out(p.batch * heads * f.length_q * f.value_width),
        k(p.batch * p.kv_heads * f.length_k * f.width),
        v(p.batch * p.kv_heads * f.length_k * f.value_width),
        rows(p.batch * heads * f.length_q) {}
  int64_t q, out, k, v, rows;
};

int64_t flash_width(const AttentionFacts& f) { return round_up(f.width, f.width <= 128 ? 32 : 64); }

int64_t flash_bytes(const AttentionFacts& f, const Piece& p) {
  const int64_t heads = p.kv_heads * heads_per_kv(f);
  const PieceSizes n(f, p, heads);
  const int64_t narrow = static_cast<int64_t>(c10::elementSize(f.dtype));
  const int64_t width = flash_width(f);
  if (!f.backward) {
    const int64_t splits = flash_key_splits(f, p);
    const int64_t partial = splits > 1 ? splits * n.rows : 0;
    return allocated(n.out * narrow) + allocated(n.rows * 4) + allocated(partial * width * 4) +
           allocated(partial * 4);
  }
  // Sums of dq: a copy for each block that works on a head, so that each copy has one order.
  const int64_t copies = ceil_div(f.machine.multiprocessors, std::max<int64_t>(p.batch * heads, 1));
  const int64_t rows = p.batch * heads * round_up(f.length_q, 128);
  int64_t bytes = 2 * allocated(n.out * narrow) + allocated(n.rows * 4);  // dense copies, lse
  bytes += allocated(n.q * narrow) + allocated(n.k * narrow) + allocated(n.v * narrow);
  bytes += allocated(rows * 4) + allocated(copies * rows * width * 4);
  if (heads != p.kv_heads)  // dk and dv of every query head
    bytes += heads_per_kv(f) * (allocated(n.k * narrow) + allocated(n.v * narrow));
  return bytes;
}

int64_t efficient_bytes(const AttentionFacts& f, const Piece& p) {
  const PieceSizes n(f, p, p.kv_heads);  // query heads that share keys take turns
  const int64_t narrow = static_cast<int64_t>(c10::elementSize(f.dtype));
  const int64_t lse = allocated(p.batch * p.kv_heads * round_up(f.length_q, 32) * 4);
  if (!f.backward) {
    const bool sums = is_half(f.dtype) && f.value_width > 128;  // leave registers
    return allocated(n.out * narrow) + lse + (sums ? allocated(n.out * 4) : 0);
  }
  int64_t bytes = 2 * allocated(n.out * narrow) + lse + allocated(n.rows * 4);  // dout, out; delta
  bytes += allocated(n.q * narrow) + allocated(n.k * narrow) + allocated(n.v * narrow);
  // Product of dout and out, and its row sums before they are laid out by head.
  if (!is_half(f.dtype)) bytes += allocated(n.out * 4) + allocated(n.rows * 4);
  // Its workspace: dq in tiles with a header each and, where registers do not hold them, a tile of
  // dk and one of dv.
  const int64_t widest = std::max(f.width, f.value_width), tile = widest <= 64 ? 64 : 128;
  const int64_t tiles = ceil_div(f.length_q, 64) * ceil_div(f.width, 64);
  const int64_t tile_sums = round_up(f.length_q, tile) * round_up(f.width, tile) * 4 + tiles * 16;
  const bool spills = is_half(f.dtype) && widest > 64;
  const int64_t key_sums =
      spills ? 64 * (round_up(f.width, 128) + round_up(f.value_width, 128)) * 4 : 0;
  return bytes + allocated(p.batch * p.kv_heads * (tile_sums + key_sums));
}

int64_t cudnn_bytes(const AttentionFacts& f, const Piece& p) {
  const PieceSizes n(f, p, p.kv_heads * heads_per_kv(f));
  return allocated(n.out * static_cast<int64_t>(c10::elementSize(f.dtype))) + allocated(n.rows * 4);
}

}  // namespace

// num_splits_heuristic of flash_api.cpp: the fewest splits that keep the multiprocessors as busy as
// 0.85 of the best choice.
int64_t flash_key_splits(const AttentionFacts& f, const Piece& p) {
  const int64_t processors = 2 * std::max<int64_t>(f.machine.multiprocessors, 1);
  const int64_t key_block = f.width <= 64 ? 256 : f.width <= 128 ? 128 : 64;
  const int64_t key_blocks = ceil_div(f.length_k, key_block);
  // A single query row of grouped heads is turned so that the heads of a group are its rows.
  const int64_t rows = f.length_q == 1 ? heads_per_kv(f) : f.length_q;
  const int64_t heads = f.length_q == 1 ? p.kv_heads : p.kv_heads * heads_per_kv(f);
  const int64_t blocks = p.batch * heads * ceil_div(rows, 64);
  if (static_cast<double>(blocks) >= 0.8 * static_cast<double>(processors)) return 1;
  const int64_t most = std::min<int64_t>({128, processors, key_blocks});
  const auto eligible = [&](int64_t splits) {
    return splits == 1 || ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1);
  };
  const auto efficiency = [&](int64_t splits) {
    const float waves = static_cast<float>(blocks * splits) / static_cast<float>(processors);
    return waves / std::ceil(waves);
  };
  float best = 0.0f;
  for (int64_t splits = 1; splits <= most; ++splits)
    if (eligible(splits)) best = std::max(best, efficiency(splits));
  for (int64_t splits = 1; splits <= most; ++splits)
    if (eligible(splits) && efficiency(splits) >= 0.85f * best) return splits;
  return 1;
}

int64_t temporary_bytes(Route route, const AttentionFacts& f, const Piece& piece) {
  switch (route) {
    case Route::kCudnn:
      return cudnn_bytes(f, piece);
    case Route::kFlash:
      return flash_bytes(f, piece);
    case Route::kEfficient:
      return efficient_bytes(f, piece);
    default:
      return 0;
  }
}

// Whole groups where they fit, else samples of them, else heads of one sample.
Piece piece_of(Route route, const AttentionFacts& f) {
  const auto fits = [&](const Piece& p) { return temporary_bytes(route, f, p) <= f.scratch; };
  for (int64_t cuts = 1, last = 0; cuts <= f.batch; ++cuts) {
    const Piece piece{ceil_div(f.batch, cuts), f.kv_heads};
    if (piece.batch != last && fits(piece)) return piece;
    last = piece.batch;
  }
  for (int64_t cuts = 2, last = 0; cuts <= f.kv_heads; ++cuts) {
    const Piece piece{1, ceil_div(f.kv_heads, cuts)};
    if (piece.kv_heads != last && fits(piece)) return piece;
    last = piece.kv_heads;
  }
  return {};
}

}  // namespace fused_remat::cuda
