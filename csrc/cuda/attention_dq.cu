// Backward by tiles of queries: dq = scale ds k, where a cap's slope multiplies ds first. With p
// the probabilities, which come again from the known lse, and M the dropout factors:
// ds = p (M dp - delta), dp = dout v^T plus what comes in for the weights.
#include "attention_scores.cuh"

namespace fused_remat::cuda {
namespace {

template <class T, class Shape, bool kPlain>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    attention_dq_kernel(AttentionDqArgs args) {
  using A = Accumulate<T>;
  const AttentionBwdArgs& bwd = args.bwd;
  const AttentionCall& call = bwd.call;
  const Units<T, kPlain> units(call);
  const QueryTile tile(call, Shape::kRows);
  const Thread thread;
  T* const q_tile = dynamic_shared<T>();
  T* const dout_tile = q_tile + Shape::kRows * Shape::kStride;
  T* const k_tile = dout_tile + Shape::kRows * Shape::kStride;
  T* const v_tile = k_tile + Shape::kColumns * Shape::kStride;
  T* const staged = v_tile + Shape::kColumns * Shape::kStride + thread.warp * Shape::kStaged;
  const KeyVisits visits(call, tile.i0, Shape::kRows, Shape::kColumns);
  const auto load = [&](T* to, const AttentionHeads<const void>& x, int step, int width) {
    if (step < visits.steps)
      load_tile<Shape, Shape::kColumns>(
          to, x, tile.batch, tile.kv_head, visits.key(step), call.length_k, width);
    cp_async_commit();
  };
  load_tile<Shape, Shape::kRows>(
      q_tile, call.q, tile.batch, tile.head, tile.i0, call.length_q, call.width);
  load_tile<Shape, Shape::kRows>(
      dout_tile, bwd.dout, tile.batch, tile.head, tile.i0, call.length_q, call.value_width);
  load(v_tile, call.v, 0, call.value_width);
  load(k_tile, call.k, 0, call.width);
  const RowNumbers<A> rows[2] = {
      load_row(bwd, units, tile.batch, tile.head, tile.i0 + thread.row),
      load_row(bwd, units, tile.batch, tile.head, tile.i0 + thread.row + 8)};
  A sums[Shape::kSums][4];
  clear(sums);
  const int own = 16 * thread.warp * Shape::kStride;
  for (int step = 0; step < visits.steps; ++step) {
    const int j0 = visits.key(step);
    cp_async_wait<0>();
    __syncthreads();
    A p[Shape::kTiles][4], dp[Shape::kTiles][4];
    A slopes[kPlain ? 1 : Shape::kTiles][4];
    multiply_rows<Shape>(p, q_tile + own, k_tile, call.width);
    multiply_rows<Shape>(dp, dout_tile + own, v_tile, call.value_width);
    __syncthreads();
    load(v_tile, call.v, step + 1, call.value_width);
    const ScorePlace<false> place{tile.batch, tile.head, tile.i0 + thread.row, j0 + thread.column};
    finish_scores<T>(
        call, units, place, all_seen(call, tile.i0, Shape::kRows, j0, Shape::kColumns), p,
        kPlain ? nullptr : slopes);
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = probability(units, p[n][i], rows[i / 2]);
    const uint32_t kept = kPlain ? ~0u : kept_bits<Shape::kTiles>(call, place);
    score_gradients<kPlain>(bwd, place, kept, p, dp, [&](int, int i) { return rows[i / 2]; });
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        dp[n][i] *= A(call.scale) * (kPlain ? A(1) : slopes[kPlain ? 0 : n][i]);
    multiply_scores<Shape>(sums, dp, k_tile, call.width, staged);
    __syncthreads();
    load(k_tile, call.k, step + 1, call.width);
  }
  cp_async_wait<0>();
  store_fragments<A>(
      args.dq, tile.batch, tile.head, tile.i0 + thread.row, thread.column, call.length_q,
      call.width, sums, {A(1), A(1)});
}

// Beside a cap's slopes and masks, registers hold fewer scores.
template <class T, int kWidth, bool kPlain>
constexpr int dq_columns = kPlain                      ? 64
                           : kWidth * sizeof(T) <= 256 ? 32
                                                       : 16;

template <class T, int kWidth, bool kPlain>
void launch_dq(const AttentionDqArgs& args, Stream stream) {
  using Shape = AttentionShape<T, kWidth, dq_columns<T, kWidth, kPlain>>;
  const AttentionCall& call = args.bwd.call;
  const int64_t blocks = int64_t{call.batch} * call.heads * tiles_of(call.length_q, Shape::kRows);
  launch(
      "attention_dq", attention_dq_kernel<T, Shape, kPlain>, attention_grid("attention_dq", blocks),
      dim3(Shape::kThreads), Shape::template shared_bytes<2, 2>(), stream, args);
}

}  // namespace

void launch_attention_dq(const AttentionDqArgs& args, Dtype dtype, Stream stream) {
  const AttentionCall& call = args.bwd.call;
  const bool plain = call.plain() && args.bwd.dweights.data == nullptr;
  with_attention_variant(dtype, call, plain, [&](auto zero, auto width, auto is_plain) {
    launch_dq<decltype(zero), width, is_plain>(args, stream);
  });
}

}  // namespace fused_remat::cuda
