// The gradient of a float mask: sums of the gradient of the masked scores over the dims that the
// mask does not have. A block owns a tile of the result and visits what is summed in a fixed order.
#include "attention_scores.cuh"

namespace fused_remat::cuda {
namespace {

// The tiles that go into a block's part of the result.
struct MaskTile {
  int64_t batch, head;  // of the mask
  int i0 = 0, j0 = 0;   // of what the block owns, where the mask has queries, keys
  int first_q = 0, count_q, first_k = 0, count_k;

  __device__ __forceinline__ MaskTile(const AttentionDmaskArgs& args, int rows, int columns) {
    const AttentionCall& call = args.bwd.call;
    const int tiles_q = (call.length_q + rows - 1) / rows;
    const int tiles_k = (call.masked_keys + columns - 1) / columns;
    count_q = tiles_q;
    count_k = tiles_k;
    unsigned place = blockIdx.x;
    if (!args.sum_keys) {
      first_k = place % tiles_k;
      count_k = 1;
      place /= tiles_k;
    }
    if (!args.sum_queries) {
      first_q = place % tiles_q;
      count_q = 1;
      place /= tiles_q;
    }
    i0 = first_q * rows;
    j0 = first_k * columns;
    head = place % args.heads;
    batch = place / args.heads;
  }
};

// Whether any query from i0 sees any masked key from j0 by the band.
__device__ __forceinline__ bool band_meets(
    const AttentionCall& call, int i0, int rows, int j0, int columns) {
  const int last_query = (i0 + rows < call.length_q ? i0 + rows : call.length_q) - 1;
  const int last_key = (j0 + columns < call.masked_keys ? j0 + columns : call.masked_keys) - 1;
  return last_key - i0 >= call.low && j0 - last_query <= call.high;
}

// sums += the gradient of the masked scores of a tile, without extra keys.
template <class T, class Shape, class A>
__device__ __forceinline__ void add_tile(
    const AttentionBwdArgs& bwd, const Units<T, false>& units, int64_t batch, int64_t head, int i0,
    int j0, A (&sums)[Shape::kTiles][4]) {
  const AttentionCall& call = bwd.call;
  const Thread thread;
  T* const q_tile = dynamic_shared<T>();
  T* const dout_tile = q_tile + Shape::kRows * Shape::kStride;
  T* const k_tile = dout_tile + Shape::kRows * Shape::kStride;
  T* const v_tile = k_tile + Shape::kColumns * Shape::kStride;
  const int64_t kv_head = head / call.group;
  __syncthreads();  // nobody reads the tiles before any more
  load_tile<Shape, Shape::kRows>(q_tile, call.q, batch, head, i0, call.length_q, call.width);
  load_tile<Shape, Shape::kRows>(
      dout_tile, bwd.dout, batch, head, i0, call.length_q, call.value_width);
  load_tile<Shape, Shape::kColumns>(k_tile, call.k, batch, kv_head, j0, call.length_k, call.width);
  load_tile<Shape, Shape::kColumns>(
      v_tile, call.v, batch, kv_head, j0, call.length_k, call.value_width);
  cp_async_commit();
  const RowNumbers<A> rows[2] = {
      load_row(bwd, units, batch, head, i0 + thread.row),
      load_row(bwd, units, batch, head, i0 + thread.row + 8)};
  cp_async_wait<0>();
  __syncthreads();
  const int own = 16 * thread.warp * Shape::kStride;
  A p[Shape::kTiles][4], dp[Shape::kTiles][4];
  multiply_rows<Shape>(p, q_tile + own, k_tile, call.width);
  multiply_rows<Shape>(dp, dout_tile + own, v_tile, call.value_width);
  const ScorePlace<false> place{batch, head, i0 + thread.row, j0 + thread.column};
  finish_scores<T>(call, units, place, all_seen(call, i0, Shape::kRows, j0, Shape::kColumns), p);
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) p[n][i] = probability(units, p[n][i], rows[i / 2]);
  score_gradients<false>(bwd, place, kept_bits<Shape::kTiles>(call, place), p, dp, [&](int, int i) {
    return rows[i / 2];
  });
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (place.key(n, i) < call.masked_keys) sums[n][i] += dp[n][i];
}

// The block's sums to the mask: rows, columns or both added up first where it has one for all.
template <class Shape, class A>
__device__ __forceinline__ void add_to_mask(
    const AttentionDmaskArgs& args, const MaskTile& tile, const A (&sums)[Shape::kTiles][4]) {
  const AttentionCall& call = args.bwd.call;
  const Thread thread;
  constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns;
  A* const shared = dynamic_shared<A>();  // [kRows, kColumns]
  __syncthreads();
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      shared[(thread.row + 8 * (i / 2)) * kColumns + thread.column + 8 * n + i % 2] = sums[n][i];
  __syncthreads();
  const int rows = args.sum_queries ? 1 : kRows, columns = args.sum_keys ? 1 : kColumns;
  A* const to = static_cast<A*>(args.dmask.data) + tile.batch * args.dmask.batch +
                tile.head * args.dmask.head;
  for (int at = threadIdx.x; at < rows * columns; at += Shape::kThreads) {
    const int row = at / columns, column = at % columns;
    const int query = tile.i0 + row, key = tile.j0 + column;
    if (!args.sum_queries && query >= call.length_q) continue;
    if (!args.sum_keys && key >= call.masked_keys) continue;
    A sum = A(0);
    for (int r = row; r < (args.sum_queries ? kRows : row + 1); ++r)
      for (int c = column; c < (args.sum_keys ? kColumns : column + 1); ++c)
        sum += shared[r * kColumns + c];
    to[query * args.dmask.row + key * args.dmask.column] += sum;
  }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_dmask_kernel(AttentionDmaskArgs args) {
  using A = Accumulate<T>;
  const AttentionCall& call = args.bwd.call;
  const Units<T, false> units(call);
  const MaskTile tile(args, Shape::kRows, Shape::kColumns);
  A sums[Shape::kTiles][4];
  clear(sums);
  for (int64_t batch = tile.batch; batch < call.batch; batch += args.batches)
    for (int64_t head = tile.head; head < call.heads; head += args.heads)
      for (int q = tile.first_q; q < tile.first_q + tile.count_q; ++q)
        for (int k = tile.first_k; k < tile.first_k + tile.count_k; ++k) {
          const int i0 = q * Shape::kRows, j0 = k * Shape::kColumns;
          if (band_meets(call, i0, Shape::kRows, j0, Shape::kColumns))
            add_tile<T, Shape>(args.bwd, units, batch, head, i0, j0, sums);
        }
  add_to_mask<Shape>(args, tile, sums);
}

}  // namespace

void launch_attention_dmask(const AttentionDmaskArgs& args, Dtype dtype, Stream stream) {
  const AttentionCall& call = args.bwd.call;
  const int width = std::max(call.width, call.value_width);
  with_attention_shape(dtype, width, [&](auto zero, auto head_width) {
    using T = decltype(zero);
    using Shape = AttentionShape<T, head_width, /*kMostColumns=*/32>;
    constexpr size_t kShared = Shape::template shared_bytes<2, 2>();
    static_assert(Shape::kRows * Shape::kColumns * sizeof(Accumulate<T>) <= kShared);
    const int64_t blocks = int64_t{args.batches} * args.heads *
                           (args.sum_queries ? 1 : tiles_of(call.length_q, Shape::kRows)) *
                           (args.sum_keys ? 1 : tiles_of(call.masked_keys, Shape::kColumns));
    launch(
        "attention_dmask", attention_dmask_kernel<T, Shape>,
        attention_grid("attention_dmask", blocks), dim3(Shape::kThreads), kShared, stream, args);
  });
}

}  // namespace fused_remat::cuda
