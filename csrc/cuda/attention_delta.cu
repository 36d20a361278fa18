// What backward needs of every row: delta, the correction of a large lse, and `out` where it was
// not kept.
#include "../large_lse.h"
#include "attention_keys.cuh"

namespace fused_remat::cuda {
namespace {

template <class A>
__device__ __forceinline__ bool is_large(A lse) {
  const A size = lse < A(0) ? -lse : lse;
  return size > A(kLargeLse) && size < kInfinity<A>;
}

// This thread's part of a row's sums over its keys, with p = exp(s - lse).
template <class A>
struct RowSums {
  A total = A(0);    // of p
  A weighed = A(0);  // of dropped p times the gradient of its weight
};

template <class A, int kTiles>
__device__ __forceinline__ void weigh_rows(
    const AttentionDeltaArgs& args, const QueryTile& tile, const ScorePlace<false>& place,
    const A (&p)[kTiles][4], RowSums<A> (&row)[2]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      row[i / 2].weighed += p[n][i] * weights_gradient<A>(
                                          args.call, args.dweights, tile.batch, tile.head,
                                          place.query(n, i), place.key(n, i));
}

// The part of this thread of the dot product of a row of dout with `out`.
template <class T, class Shape, class A>
__device__ __forceinline__ A row_dot(
    const AttentionDeltaArgs& args, const QueryTile& tile, int query, int column, int half,
    const A (&sums)[Shape::kSums][4], A factor) {
  if (query >= args.call.length_q) return A(0);
  const int64_t row = query;
  const T* const dout = rows_of<T>(args.dout, tile.batch, tile.head) + row * args.dout.row;
  const T* const out = rows_of<T>(args.out, tile.batch, tile.head) + row * args.out.row;
  const bool rebuilt = args.rebuilt.data != nullptr;
  A dot = A(0);
#pragma unroll
  for (int n = 0; n < Shape::kSums; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = column + 8 * n + i;
      if (at >= args.call.value_width) continue;
      const A value = rebuilt ? sums[n][2 * half + i] * factor : static_cast<A>(out[at]);
      dot += static_cast<A>(dout[at]) * value;
    }
  return dot;
}

template <class T, class Shape, bool kPlain>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_delta_kernel(AttentionDeltaArgs args) {
  using A = Accumulate<T>;
  const AttentionCall& call = args.call;
  const Units<T, kPlain> units(call);
  const QueryTile tile(call, Shape::kRows);
  const Thread thread;
  const bool rebuild = args.rebuilt.data != nullptr;
  const bool weights = !kPlain && args.dweights.data != nullptr;
  A lse[2];
  RowSums<A> row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = tile.i0 + thread.row + 8 * half;
    lse[half] = query < call.length_q ? row_number<A>(args.lse, tile.batch, tile.head, query)
                                      : -kInfinity<A>;
  }
  A sums[Shape::kSums][4];
  clear(sums);
  __shared__ int any_large;
  if (threadIdx.x == 0) any_large = 0;
  __syncthreads();
  if (is_large(lse[0]) || is_large(lse[1])) any_large = 1;
  __syncthreads();
  if (rebuild || weights || any_large != 0)
    visit_keys<Shape, T>(
        call, units, tile, rebuild, sums,
        [&](A(&s)[Shape::kTiles][4], const ScorePlace<false>& place) {
#pragma unroll
          for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              s[n][i] = probability(units, s[n][i], known_row(units, lse[i / 2], A(0), A(0)));
              row[i / 2].total += s[n][i];
            }
          if constexpr (!kPlain) {
            if (rebuild || weights) drop(kept_bits<Shape::kTiles>(call, place), s);
            if (weights) weigh_rows(args, tile, place, s, row);
          }
        });
  A factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // The known lse is rounded and probabilities sum to 1 only nearly: out and delta are those of
    // normalised ones, or the gradient of the scores would not sum to 0.
    const A total = row_sum(row[half].total), divisor = total == A(0) ? A(1) : total;
    factor[half] = (kPlain ? A(1) : A(call.keep_scale)) / divisor;
    const int query = tile.i0 + thread.row + 8 * half;
    const A weighed = row_sum(row[half].weighed) * factor[half] * A(args.factor);
    const bool first = thread.lane % 4 == 0 && query < call.length_q;
    if (first)
      static_cast<A*>(args.correction.data)
          [tile.batch * args.correction.batch + tile.head * args.correction.head + query] =
              is_large(lse[half]) ? log_of(divisor) : A(0);
    if (args.dout.data == nullptr) continue;
    const A delta =
        row_sum(row_dot<T, Shape>(args, tile, query, thread.column, half, sums, factor[half]));
    if (first)
      static_cast<A*>(
          args.delta.data)[tile.batch * args.delta.batch + tile.head * args.delta.head + query] =
          delta + weighed;
  }
  if (rebuild)
    store_fragments<T>(
        args.rebuilt, tile.batch, tile.head, tile.i0 + thread.row, thread.column, call.length_q,
        call.value_width, sums, factor);
}

// Beside masks, registers hold fewer scores.
template <class T, int kWidth, bool kPlain>
constexpr int delta_columns = kPlain                      ? 64
                              : kWidth * sizeof(T) <= 256 ? 32
                                                          : 16;

template <class T, int kWidth, bool kPlain>
void launch_delta(const AttentionDeltaArgs& args, Stream stream) {
  using Shape = AttentionShape<T, kWidth, delta_columns<T, kWidth, kPlain>>;
  const AttentionCall& call = args.call;
  const int64_t blocks = int64_t{call.batch} * call.heads * tiles_of(call.length_q, Shape::kRows);
  launch(
      "attention_delta", attention_delta_kernel<T, Shape, kPlain>,
      attention_grid("attention_delta", blocks), dim3(Shape::kThreads),
      Shape::template shared_bytes<1, 2, sizeof(int)>(), stream, args);
}

}  // namespace

void launch_attention_delta(const AttentionDeltaArgs& args, Dtype dtype, Stream stream) {
  const AttentionCall& call = args.call;
  const bool plain = call.plain() && args.dweights.data == nullptr;
  with_attention_variant(dtype, call, plain, [&](auto zero, auto width, auto is_plain) {
    launch_delta<decltype(zero), width, is_plain>(args, stream);
  });
}

}  // namespace fused_remat::cuda
