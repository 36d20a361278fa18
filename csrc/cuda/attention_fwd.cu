// Forward: out and lse of a tile of queries, by the online softmax (Milakov and Gimelshein 2018)
// over tiles of keys.
#include "attention_keys.cuh"

namespace fused_remat::cuda {
namespace {

// The largest score so far and the sum of exp(score - largest) of a thread's two rows; of the sum,
// this thread's part.
template <class A>
struct OnlineSoftmax {
  A highest[2] = {-kInfinity<A>, -kInfinity<A>}, total[2] = {};

  // s <- exp(s - highest); what was added up before has to shrink by `shrink`.
  template <class T, bool kPlain, int kTiles>
  __device__ __forceinline__ void add(
      const Units<T, kPlain>& units, A (&s)[kTiles][4], A (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      A top = highest[half];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) top = s[n][i] > top ? s[n][i] : top;
      top = row_max(top);
      // No key so far: -inf minus -inf would be NaN.
      const A shift = top == -kInfinity<A> ? A(0) : top;
      shrink[half] = units.exponential(highest[half] - shift);
      A sum = A(0);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[n][i] = units.exponential(s[n][i] - shift);
          sum += s[n][i];
        }
      total[half] = total[half] * shrink[half] + sum;
      highest[half] = top;
    }
  }
};

template <class T, class Shape, bool kPlain>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    attention_fwd_kernel(AttentionFwdArgs args) {
  using A = Accumulate<T>;
  const AttentionCall& call = args.call;
  const Units<T, kPlain> units(call);
  const QueryTile tile(call, Shape::kRows);
  const Thread thread;
  A sums[Shape::kSums][4];
  clear(sums);
  OnlineSoftmax<A> softmax;
  visit_keys<Shape, T>(
      call, units, tile, /*with_values=*/true, sums,
      [&](A(&s)[Shape::kTiles][4], const ScorePlace<false>& place) {
        A shrink[2];
        softmax.add(units, s, shrink);
        if (!kPlain) drop(kept_bits<Shape::kTiles>(call, place), s);
#pragma unroll
        for (int n = 0; n < Shape::kSums; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[n][i] *= shrink[i / 2];
      });
  A factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const A total = row_sum(softmax.total[half]);
    // By the sum and not by the maximum: a row of NaN has no maximum, but it is not empty.
    const bool empty = total == A(0);
    factor[half] = (kPlain ? A(1) : A(call.keep_scale)) / (empty ? A(1) : total);
    const int query = tile.i0 + thread.row + 8 * half;
    if (thread.lane % 4 != 0 || query >= call.length_q) continue;
    static_cast<A*>(
        args.lse.data)[tile.batch * args.lse.batch + tile.head * args.lse.head + query] =
        empty ? -kInfinity<A> : softmax.highest[half] / units.one + log_of(total);
  }
  store_fragments<T>(
      args.out, tile.batch, tile.head, tile.i0 + thread.row, thread.column, call.length_q,
      call.value_width, sums, factor);
}

template <class T, int kWidth, bool kPlain>
void launch_fwd(const AttentionFwdArgs& args, Stream stream) {
  using Shape = AttentionShape<T, kWidth>;
  const AttentionCall& call = args.call;
  const int64_t blocks = int64_t{call.batch} * call.heads * tiles_of(call.length_q, Shape::kRows);
  launch(
      "attention_fwd", attention_fwd_kernel<T, Shape, kPlain>,
      attention_grid("attention_fwd", blocks), dim3(Shape::kThreads),
      Shape::template shared_bytes<1, 2>(), stream, args);
}

}  // namespace

void launch_attention_fwd(const AttentionFwdArgs& args, Dtype dtype, Stream stream) {
  const AttentionCall& call = args.call;
  const bool plain = call.plain();
  with_attention_variant(dtype, call, plain, [&](auto zero, auto width, auto is_plain) {
    launch_fwd<decltype(zero), width, is_plain>(args, stream);
  });
}

}  // namespace fused_remat::cuda
