// Attention weights: a block owns a tile of them and visits the heads that they are averaged over.
#include "attention_scores.cuh"

namespace fused_remat::cuda {
namespace {

// A block's tile of a result that has rows of queries and columns of keys.
struct WeightsTile {
  int64_t batch, owner;
  int i0, j0;

  __device__ __forceinline__
  WeightsTile(const AttentionCall& call, int owners, int rows, int columns) {
    const unsigned tiles_k = (call.length_k + columns - 1) / columns;
    const unsigned tiles_q = (call.length_q + rows - 1) / rows;
    unsigned place = blockIdx.x;
    j0 = place % tiles_k * columns;
    place /= tiles_k;
    i0 = place % tiles_q * rows;
    place /= tiles_q;
    owner = place % owners;
    batch = place / owners;
  }
};

// Whether any query of the tile sees any of its keys, masks aside.
__device__ __forceinline__ bool any_seen(
    const AttentionCall& call, int i0, int rows, int j0, int columns) {
  const QueryVisits visits(call, j0, columns, rows);
  const int tile = i0 / rows;
  return tile >= visits.first && tile < visits.first + visits.count;
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_weights_kernel(AttentionWeightsArgs args) {
  using A = Accumulate<T>;
  const AttentionCall& call = args.call;
  const Units<T, false> units(call);
  const WeightsTile tile(call, args.owners, Shape::kRows, Shape::kColumns);
  if (!any_seen(call, tile.i0, Shape::kRows, tile.j0, Shape::kColumns)) return;
  const Thread thread;
  T* const q_tile = dynamic_shared<T>();
  T* const k_tile = q_tile + Shape::kRows * Shape::kStride;
  const bool whole = all_seen(call, tile.i0, Shape::kRows, tile.j0, Shape::kColumns);
  A sums[Shape::kTiles][4];
  clear(sums);
  for (int64_t head = tile.owner; head < call.heads; head += args.owners) {
    __syncthreads();
    load_tile<Shape, Shape::kRows>(
        q_tile, call.q, tile.batch, head, tile.i0, call.length_q, call.width);
    load_tile<Shape, Shape::kColumns>(
        k_tile, call.k, tile.batch, head / call.group, tile.j0, call.length_k, call.width);
    cp_async_commit();
    RowNumbers<A> rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile.i0 + thread.row + 8 * half;
      rows[half] = query >= call.length_q
                       ? RowNumbers<A>{kInfinity<A>, A(0), A(0)}
                       : known_row(
                             units, row_number<A>(args.lse, tile.batch, head, query),
                             row_number<A>(args.correction, tile.batch, head, query), A(0));
    }
    cp_async_wait<0>();
    __syncthreads();
    A s[Shape::kTiles][4];
    multiply_rows<Shape>(s, q_tile + 16 * thread.warp * Shape::kStride, k_tile, call.width);
    const ScorePlace<false> place{tile.batch, head, tile.i0 + thread.row, tile.j0 + thread.column};
    finish_scores<T>(call, units, place, whole, s);
    const uint32_t kept = kept_bits<Shape::kTiles>(call, place);
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (kept >> (4 * n + i) & 1) sums[n][i] += probability(units, s[n][i], rows[i / 2]);
  }
  const A factor = A(args.factor) * A(call.keep_scale);
  A* const to = static_cast<A*>(args.weights.data) + tile.batch * args.weights.batch +
                tile.owner * args.weights.head;
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int query = tile.i0 + thread.row + 8 * (i / 2);
      const int key = tile.j0 + thread.column + 8 * n + i % 2;
      if (query < call.length_q && key < call.length_k)
        to[query * args.weights.row + key * args.weights.column] += sums[n][i] * factor;
    }
}

}  // namespace

void launch_attention_weights(const AttentionWeightsArgs& args, Dtype dtype, Stream stream) {
  const AttentionCall& call = args.call;
  with_attention_shape(dtype, call.width, [&](auto zero, auto head_width) {
    using T = decltype(zero);
    using Shape = AttentionShape<T, head_width, /*kMostColumns=*/32>;
    const int64_t blocks = int64_t{call.batch} * args.owners *
                           tiles_of(call.length_q, Shape::kRows) *
                           tiles_of(call.length_k, Shape::kColumns);
    launch(
        "attention_weights", attention_weights_kernel<T, Shape>,
        attention_grid("attention_weights", blocks), dim3(Shape::kThreads),
        Shape::template shared_bytes<1, 1>(), stream, args);
  });
}

}  // namespace fused_remat::cuda
