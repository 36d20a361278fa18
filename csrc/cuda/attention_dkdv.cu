// Backward by tiles of keys: dv = (M p)^T dout, dk = scale ds^T q, with names as in
// attention_dq.cu. A block owns a tile of keys of one key-value head, and visits the query heads
// that share it in turn.
#include "attention_scores.cuh"

namespace fused_remat::cuda {
namespace {

// The sums of both fit the registers of narrow heads; wide ones take a launch for each.
enum class Part { kBoth, kDk, kDv };

// The row numbers of the visited queries, in shared memory.
template <class A, int kColumns>
struct VisitedRows {
  A lse[kColumns], correction[kColumns], delta[kColumns];
};

// A block's keys, and its steps over query heads and query tiles.
struct KeyTile {
  int64_t batch, kv_head;
  int j0, steps;
  QueryVisits visits;

  __device__ __forceinline__ KeyTile(const AttentionCall& call, int rows, int columns)
      : j0(static_cast<int>(blockIdx.x % key_tiles(call, rows)) * rows),
        visits(call, j0, rows, columns) {
    const unsigned place = blockIdx.x / key_tiles(call, rows), kv_heads = call.heads / call.group;
    kv_head = place % kv_heads;
    batch = place / kv_heads;
    steps = visits.count * call.group;
  }
  __device__ __forceinline__ int64_t head(const AttentionCall& call, int step) const {
    return kv_head * call.group + step / visits.count;
  }
  __device__ __forceinline__ int query(int step, int columns) const {
    return (visits.first + step % visits.count) * columns;
  }

 private:
  static __device__ __forceinline__ unsigned key_tiles(const AttentionCall& call, int rows) {
    return (call.length_k + rows - 1) / rows;
  }
};

template <class T, class Shape, bool kPlain, Part kPart>
__global__ void __launch_bounds__(Shape::kThreads, kPlain ? 0 : 1)
    attention_dkdv_kernel(AttentionDkDvArgs args) {
  using A = Accumulate<T>;
  constexpr bool kDk = kPart != Part::kDv, kDv = kPart != Part::kDk;
  constexpr int kColumns = Shape::kColumns, kTiles = Shape::kTiles;
  const AttentionBwdArgs& bwd = args.bwd;
  const AttentionCall& call = bwd.call;
  const Units<T, kPlain> units(call);
  const KeyTile tile(call, Shape::kRows, kColumns);
  const Thread thread;
  __shared__ VisitedRows<A, kColumns> visited;
  T* const k_tile = dynamic_shared<T>();
  T* const v_tile = k_tile + Shape::kRows * Shape::kStride;
  T* const q_tile = k_tile + (kDk ? 2 : 1) * Shape::kRows * Shape::kStride;
  T* const dout_tile = q_tile + kColumns * Shape::kStride;
  T* const staged = dout_tile + kColumns * Shape::kStride + thread.warp * Shape::kStaged;
  const auto load = [&](T* to, const AttentionHeads<const void>& x, int step, int width) {
    if (step < tile.steps)
      load_tile<Shape, kColumns>(
          to, x, tile.batch, tile.head(call, step), tile.query(step, kColumns), call.length_q,
          width);
    cp_async_commit();
  };
  const auto load_rows = [&](int step) {
    if (step >= tile.steps || threadIdx.x >= kColumns) return;
    const RowNumbers<A> row = load_row(
        bwd, units, tile.batch, tile.head(call, step),
        tile.query(step, kColumns) + static_cast<int>(threadIdx.x));
    visited.lse[threadIdx.x] = row.lse;
    visited.correction[threadIdx.x] = row.correction;
    visited.delta[threadIdx.x] = row.delta;
  };
  const auto row_of = [&](int n, int i) {
    const int at = thread.column + 8 * n + i % 2;
    return RowNumbers<A>{visited.lse[at], visited.correction[at], visited.delta[at]};
  };
  load_tile<Shape, Shape::kRows>(
      k_tile, call.k, tile.batch, tile.kv_head, tile.j0, call.length_k, call.width);
  if (kDk)
    load_tile<Shape, Shape::kRows>(
        v_tile, call.v, tile.batch, tile.kv_head, tile.j0, call.length_k, call.value_width);
  load(dout_tile, bwd.dout, 0, call.value_width);
  load(q_tile, call.q, 0, call.width);
  load_rows(0);
  A dk[kDk ? Shape::kSums : 1][4], dv[kDv ? Shape::kSums : 1][4];
  clear(dk);
  clear(dv);
  const int own = 16 * thread.warp * Shape::kStride;
  for (int step = 0; step < tile.steps; ++step) {
    const int i0 = tile.query(step, kColumns);
    cp_async_wait<0>();
    __syncthreads();
    A p[kTiles][4], slopes[kPlain ? 1 : kTiles][4];
    multiply_rows<Shape>(p, k_tile + own, q_tile, call.width);
    const ScorePlace<true> place{
        tile.batch, tile.head(call, step), tile.j0 + thread.row, i0 + thread.column};
    finish_scores<T>(
        call, units, place, all_seen(call, i0, kColumns, tile.j0, Shape::kRows), p,
        kPlain || !kDk ? nullptr : slopes);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = probability(units, p[n][i], row_of(n, i));
    const uint32_t kept = kPlain ? ~0u : kept_bits<kTiles>(call, place);
    if constexpr (kDv) {
      A dropped[kTiles][4];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          dropped[n][i] = kPlain || kept >> (4 * n + i) & 1 ? p[n][i] : A(0);
      multiply_scores<Shape>(dv, dropped, dout_tile, call.value_width, staged);
    }
    A dp[kTiles][4];
    if constexpr (kDk) multiply_rows<Shape>(dp, v_tile + own, dout_tile, call.value_width);
    __syncthreads();
    load(dout_tile, bwd.dout, step + 1, call.value_width);
    if constexpr (kDk) {
      score_gradients<kPlain>(bwd, place, kept, p, dp, row_of);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          dp[n][i] *= A(call.scale) * (kPlain ? A(1) : slopes[kPlain ? 0 : n][i]);
      multiply_scores<Shape>(dk, dp, q_tile, call.width, staged);
    }
    __syncthreads();
    load(q_tile, call.q, step + 1, call.width);
    load_rows(step + 1);
  }
  cp_async_wait<0>();
  const int key = tile.j0 + thread.row;
  const A keep_scale = kPlain ? A(1) : A(call.keep_scale);
  if constexpr (kDv)
    if (args.dv.data != nullptr)
      store_fragments<A>(
          args.dv, tile.batch, tile.kv_head, key, thread.column, call.length_k, call.value_width,
          dv, {keep_scale, keep_scale});
  if constexpr (kDk)
    if (args.dk.data != nullptr)
      store_fragments<A>(
          args.dk, tile.batch, tile.kv_head, key, thread.column, call.length_k, call.width, dk,
          {A(1), A(1)});
}

template <class T, class Shape, bool kPlain, Part kPart>
void launch_part(const AttentionDkDvArgs& args, Stream stream) {
  const AttentionCall& call = args.bwd.call;
  const int64_t blocks =
      int64_t{call.batch} * (call.heads / call.group) * tiles_of(call.length_k, Shape::kRows);
  launch(
      "attention_dkdv", attention_dkdv_kernel<T, Shape, kPlain, kPart>,
      attention_grid("attention_dkdv", blocks), dim3(Shape::kThreads),
      Shape::template shared_bytes<
          kPart == Part::kDv ? 1 : 2, 2, sizeof(VisitedRows<Accumulate<T>, Shape::kColumns>)>(),
      stream, args);
}

template <class T, int kWidth, bool kPlain>
void launch_dkdv(const AttentionDkDvArgs& args, Stream stream) {
  using Shape = AttentionShape<T, kWidth, kWidth * sizeof(T) <= 256 ? 32 : 16>;
  if constexpr (kWidth * sizeof(Accumulate<T>) <= 512) {
    launch_part<T, Shape, kPlain, Part::kBoth>(args, stream);
  } else {
    if (args.dk.data != nullptr) launch_part<T, Shape, kPlain, Part::kDk>(args, stream);
    if (args.dv.data != nullptr) launch_part<T, Shape, kPlain, Part::kDv>(args, stream);
  }
}

}  // namespace

void launch_attention_dkdv(const AttentionDkDvArgs& args, Dtype dtype, Stream stream) {
  const AttentionCall& call = args.bwd.call;
  const bool plain = call.plain() && args.bwd.dweights.data == nullptr;
  with_attention_variant(dtype, call, plain, [&](auto zero, auto width, auto is_plain) {
    launch_dkdv<decltype(zero), width, is_plain>(args, stream);
  });
}

}  // namespace fused_remat::cuda
