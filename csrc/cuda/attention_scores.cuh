// Scores of a tile: which tiles are visited, masks, dropout, probabilities and their gradients.
//
// Every attention kernel makes its scores with `finish_scores`, so that backward sees what forward
// saw.
#pragma once

#include "../activations.h"
#include "attention_tile.cuh"
#include "dropout.cuh"

namespace fused_remat::cuda {

constexpr double kLog2E = 1.4426950408889634;

template <class A>
constexpr A kInfinity = A(INFINITY);

__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }

// What scores are measured in: log2 units beside rounded products, natural ones where every digit
// counts or where a float mask is added, which times log2(e) could overflow.
template <class T, bool kPlain>
struct Units {
  using A = Accumulate<T>;
  static constexpr bool kExact = sizeof(T) > 2;
  bool natural;
  A one;  // of natural units, in these

  explicit __device__ __forceinline__ Units(const AttentionCall& call)
      : natural(kExact || (!kPlain && (is_float(call.masks[0]) || is_float(call.masks[1])))),
        one(natural ? A(1) : A(kLog2E)) {}

  // exp(exponent), which is in these units.
  __device__ __forceinline__ A exponential(A exponent) const {
    if constexpr (kExact)
      return activations::Math<A>::exp(exponent);
    else
      return exp2f(kPlain ? exponent : exponent * (natural ? A(kLog2E) : A(1)));
  }

 private:
  static __device__ __forceinline__ bool is_float(const AttentionGrid<const void>& mask) {
    return mask.kind != MaskKind::kNone && mask.kind != MaskKind::kBool;
  }
};

// Which queries and keys a thread's fragments are of. `kKeyRows`: a row is a key's.
template <bool kKeyRows>
struct ScorePlace {
  int64_t batch, head;  // of the query head
  int row, column;      // of the first element

  __device__ __forceinline__ int query(int n, int i) const {
    return kKeyRows ? column + 8 * n + i % 2 : row + 8 * (i / 2);
  }
  __device__ __forceinline__ int key(int n, int i) const {
    return kKeyRows ? row + 8 * (i / 2) : column + 8 * n + i % 2;
  }
};

// Visited tiles ------------------------------------------------------------------------------

// The key tiles that a tile of queries visits: `in_band` ones from `first`, then those from
// `resume` that hold extra keys.
struct KeyVisits {
  int first, in_band, resume, steps, tile;

  __device__ __forceinline__ KeyVisits(const AttentionCall& call, int i0, int rows, int columns)
      : tile(columns) {
    const int masked = call.masked_keys;
    const int from = i0 + call.low, to = i0 + rows + call.high;
    const int end = to < masked ? to : masked;
    first = (from > 0 ? from : 0) / columns;
    const int last = end > 0 ? (end + columns - 1) / columns : 0;
    in_band = last > first ? last - first : 0;
    const int all = (call.length_k + columns - 1) / columns;
    // The first tile with extra keys, which the band may reach too.
    const int mixed = call.length_k > masked ? masked / columns : all;
    resume = in_band > 0 && last > mixed ? last : mixed;
    steps = in_band + all - resume;
  }

  // The first key of the tile of that step.
  __device__ __forceinline__ int key(int step) const {
    return (step < in_band ? first + step : resume + step - in_band) * tile;
  }
};

// The query tiles that see any key of a tile.
struct QueryVisits {
  int first, count;

  __device__ __forceinline__ QueryVisits(const AttentionCall& call, int j0, int columns, int rows) {
    const int last_key = j0 + columns < call.masked_keys ? j0 + columns : call.masked_keys;
    int from = j0 - call.high > 0 ? j0 - call.high : 0;
    int end = last_key - call.low > 0 ? last_key - call.low : 0;
    if (end > call.length_q) end = call.length_q;
    if (j0 + columns > call.masked_keys && call.length_k > call.masked_keys) {
      from = 0;
      end = call.length_q;
    }
    first = from / rows;
    const int last = (end + rows - 1) / rows;
    count = last > first ? last - first : 0;
  }
};

// A block's queries. Query heads that share keys are neighbours, then come the tiles of a head,
// those with the most keys first.
struct QueryTile {
  int64_t batch, head, kv_head;
  int i0;

  __device__ __forceinline__ QueryTile(const AttentionCall& call, int rows) {
    const int tiles = (call.length_q + rows - 1) / rows, kv_heads = call.heads / call.group;
    unsigned place = blockIdx.x;
    const int member = place % call.group;
    place /= call.group;
    int tile = place % tiles;
    place /= tiles;
    if (call.high < call.masked_keys - 1) tile = tiles - 1 - tile;
    kv_head = place % kv_heads;
    batch = place / kv_heads;
    head = kv_head * call.group + member;
    i0 = tile * rows;
  }
};

// Scores -------------------------------------------------------------------------------------

// tanh to the digits that rounded products have, with an exponential and a quotient.
__device__ __forceinline__ float quick_tanh(float x) {
  const float square = x * x;
  const float series = x - x * square * (0.33333333f - 0.13333333f * square);
  const float quotient = 1.0f - 2.0f / (1.0f + exp2f(x * static_cast<float>(2 * kLog2E)));
  return square < 0.01f ? series : quotient;
}

// scores <- softcap tanh(scale / softcap scores); slopes <- its derivative by the scaled products.
template <bool kQuick, class A, int kTiles>
__device__ __forceinline__ void cap_scores(
    const AttentionCall& call, A unit, A (&s)[kTiles][4], A (*slopes)[4]) {
  const A scale = A(call.scale / call.softcap), cap = A(call.softcap) * unit;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      A t;
      if constexpr (kQuick)
        t = quick_tanh(s[n][i] * scale);
      else
        t = activations::Math<A>::tanh(s[n][i] * scale);
      if (slopes != nullptr) slopes[n][i] = A(1) - t * t;
      s[n][i] = t * cap;
    }
}

template <class M, bool kKeyRows, class A, int kTiles>
__device__ __forceinline__ void add_mask(
    const AttentionCall& call, const AttentionGrid<const void>& mask,
    const ScorePlace<kKeyRows>& at, A (&s)[kTiles][4]) {
  const M* const from =
      static_cast<const M*>(mask.data) + at.batch * mask.batch + at.head * mask.head;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = at.query(n, i), key = at.key(n, i);
      if (query < call.length_q && key < call.masked_keys)
        s[n][i] += static_cast<A>(from[query * mask.row + key * mask.column]);
    }
}

// What a bool mask lets through of a thread's elements: bit 4 n + i.
template <int kTiles, bool kKeyRows>
__device__ __forceinline__ uint32_t seen_bits(
    const AttentionCall& call, const AttentionGrid<const void>& mask,
    const ScorePlace<kKeyRows>& at) {
  const bool* const from =
      static_cast<const bool*>(mask.data) + at.batch * mask.batch + at.head * mask.head;
  uint32_t seen = 0;
#pragma unroll 1
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = at.query(n, i), key = at.key(n, i);
      const bool inside = query < call.length_q && key < call.masked_keys;
      const bool value = !inside || from[query * mask.row + key * mask.column];
      seen |= static_cast<uint32_t>(value) << (4 * n + i);
    }
  return seen;
}

template <class T, bool kKeyRows, class A, int kTiles>
__device__ __forceinline__ void apply_masks(
    const AttentionCall& call, const ScorePlace<kKeyRows>& at, A (&s)[kTiles][4]) {
  static_assert(kTiles <= 8);
  uint32_t seen = ~uint32_t{0};
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    // Chosen and not indexed: the arguments would move to local memory.
    const AttentionGrid<const void> mask = which == 0 ? call.masks[0] : call.masks[1];
    if (mask.kind == MaskKind::kBool)
      seen &= seen_bits<kTiles>(call, mask, at);
    else if (mask.kind == MaskKind::kOperand)
      add_mask<T>(call, mask, at, s);
    else if (!std::is_same_v<T, A> && mask.kind == MaskKind::kAccumulate)
      add_mask<A>(call, mask, at, s);
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(seen >> (4 * n + i) & 1)) s[n][i] = -kInfinity<A>;
}

// -inf where the band, or the end of the queries or keys, lets a query not see a key.
template <bool kKeyRows, class A, int kTiles>
__device__ __forceinline__ void apply_band(
    const AttentionCall& call, const ScorePlace<kKeyRows>& at, A (&s)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = at.query(n, i), key = at.key(n, i), distance = key - query;
      const bool in_band = distance >= call.low && distance <= call.high;
      const bool seen = key < call.masked_keys ? in_band : key < call.length_k;
      if (!seen || query >= call.length_q) s[n][i] = -kInfinity<A>;
    }
}

// Whether every query of a tile sees every key of another one, masks aside.
__device__ __forceinline__ bool all_seen(
    const AttentionCall& call, int i0, int queries, int j0, int keys) {
  return i0 + queries <= call.length_q && j0 + keys <= call.masked_keys &&
         j0 + keys - 1 - i0 <= call.high && j0 - (i0 + queries - 1) >= call.low;
}

// From products of q and k to masked scores. `slopes`, where not null: see cap_scores; 1 without a
// cap.
template <class T, bool kPlain, bool kKeyRows, class A, int kTiles>
__device__ __forceinline__ void finish_scores(
    const AttentionCall& call, const Units<T, kPlain>& units, const ScorePlace<kKeyRows>& at,
    bool all_seen, A (&s)[kTiles][4], A (*slopes)[4] = nullptr) {
  if (!kPlain && call.softcap > 0.0) {
    cap_scores<sizeof(T) == 2>(call, units.one, s, slopes);
  } else {
    const A scale = A(call.scale) * units.one;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] *= scale;
        if (slopes != nullptr) slopes[n][i] = A(1);
      }
  }
  if (!kPlain) apply_masks<T>(call, at, s);
  if (!all_seen) apply_band(call, at, s);
}

// Dropout ------------------------------------------------------------------------------------

// Which of a thread's elements are kept: bit 4 n + i. All of them without dropout.
template <int kTiles, bool kKeyRows>
__device__ __forceinline__ uint32_t
kept_bits(const AttentionCall& call, const ScorePlace<kKeyRows>& at) {
  static_assert(kTiles <= 8);
  if (call.seed == nullptr) return ~uint32_t{0};
  const auto seed = static_cast<uint64_t>(*call.seed);
  const uint64_t first =
      static_cast<uint64_t>((at.batch * call.num_heads + call.head0 + at.head) * call.length_q);
  constexpr int kTogether = kKeyRows ? 1 : 2;  // elements with consecutive indices
  uint32_t kept = 0;
#pragma unroll 1
  for (int bit = 0; bit < 4 * kTiles; bit += kTogether) {
    const int n = bit / 4, i = bit % 4;
    uint32_t words[kTogether];
    dropout_words(seed, (first + at.query(n, i)) * call.length_k + at.key(n, i), words);
#pragma unroll
    for (int next = 0; next < kTogether; ++next)
      kept |= static_cast<uint32_t>(words[next] >= call.threshold) << (bit + next);
  }
  return kept;
}

template <class A, int kTiles>
__device__ __forceinline__ void drop(uint32_t kept, A (&values)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(kept >> (4 * n + i) & 1)) values[n][i] = A(0);
}

// Known rows ---------------------------------------------------------------------------------

// A query's lse as `probabilities` take it, with the correction where it does not vanish beside it,
// and its delta.
template <class A>
struct RowNumbers {
  A lse, correction, delta;
};

template <class A>
__device__ __forceinline__ A
row_number(const AttentionRows<const void>& x, int64_t batch, int64_t head, int query) {
  return static_cast<const A*>(x.data)[batch * x.batch + head * x.head + query];
}

// Where there is nothing to attend to, +inf: the probabilities are 0.
template <class T, bool kPlain, class A>
__device__ __forceinline__ RowNumbers<A> known_row(
    const Units<T, kPlain>& units, A lse, A correction, A delta) {
  A row = lse == -kInfinity<A> ? kInfinity<A> : lse * units.one;
  if (units.natural) return {row, correction, delta};
  return {row + correction * units.one, A(0), delta};
}

template <class T, bool kPlain, class A = Accumulate<T>>
__device__ __forceinline__ RowNumbers<A> load_row(
    const AttentionBwdArgs& args, const Units<T, kPlain>& units, int64_t batch, int64_t head,
    int query) {
  if (query >= args.call.length_q) return {kInfinity<A>, A(0), A(0)};
  return known_row(
      units, row_number<A>(args.lse, batch, head, query),
      row_number<A>(args.correction, batch, head, query),
      row_number<A>(args.delta, batch, head, query));
}

// p = exp(s - lse - correction), before dropout.
template <class T, bool kPlain, class A>
__device__ __forceinline__ A
probability(const Units<T, kPlain>& units, A s, const RowNumbers<A>& row) {
  return units.exponential(kPlain ? s - row.lse : (s - row.lse) - row.correction);
}

// A number of the weights' gradient; they have extra keys too.
template <class A>
__device__ __forceinline__ A weights_gradient(
    const AttentionCall& call, const AttentionGrid<const void>& x, int64_t batch, int64_t head,
    int query, int key) {
  if (query >= call.length_q || key >= call.length_k) return A(0);
  return static_cast<const A*>(
      x.data)[batch * x.batch + head * x.head + query * x.row + key * x.column];
}

// dp <- the gradient of the masked scores, from p before dropout and dp = dout v^T.
// rows(n, i): RowNumbers of the element's query.
template <bool kPlain, bool kKeyRows, class A, int kTiles, class Rows>
__device__ __forceinline__ void score_gradients(
    const AttentionBwdArgs& args, const ScorePlace<kKeyRows>& at, uint32_t kept,
    const A (&p)[kTiles][4], A (&dp)[kTiles][4], Rows&& rows) {
  if (!kPlain) {
    if (args.dweights.data != nullptr) {
      const A factor = A(args.factor);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          dp[n][i] += factor * weights_gradient<A>(
                                   args.call, args.dweights, at.batch, at.head, at.query(n, i),
                                   at.key(n, i));
    }
    const A keep_scale = A(args.call.keep_scale);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dp[n][i] *= keep_scale;
    drop(kept, dp);
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) dp[n][i] = p[n][i] * (dp[n][i] - rows(n, i).delta);
}

}  // namespace fused_remat::cuda
