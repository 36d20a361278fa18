// The walk of forward and delta: a block's queries over their keys, by the tile.
#pragma once

#include "attention_scores.cuh"

namespace fused_remat::cuda {

// sums += (what `turn` makes of the masked scores) v, over the keys that the block's queries see.
// turn(scores, place) makes them probabilities in place. Without `with_values` the sums stay.
template <class Shape, class T, bool kPlain, class A, class Turn>
__device__ __forceinline__ void visit_keys(
    const AttentionCall& call, const Units<T, kPlain>& units, const QueryTile& tile,
    bool with_values, A (&sums)[Shape::kSums][4], Turn&& turn) {
  const Thread thread;
  T* const q_tile = dynamic_shared<T>();
  T* const k_tile = q_tile + Shape::kRows * Shape::kStride;
  T* const v_tile = k_tile + Shape::kColumns * Shape::kStride;
  T* const staged = v_tile + Shape::kColumns * Shape::kStride + thread.warp * Shape::kStaged;
  const KeyVisits visits(call, tile.i0, Shape::kRows, Shape::kColumns);
  const auto load_keys = [&](int step) {
    load_tile<Shape, Shape::kColumns>(
        k_tile, call.k, tile.batch, tile.kv_head, visits.key(step), call.length_k, call.width);
  };
  load_tile<Shape, Shape::kRows>(
      q_tile, call.q, tile.batch, tile.head, tile.i0, call.length_q, call.width);
  if (visits.steps > 0) load_keys(0);
  cp_async_commit();
  // Values arrive while scores are made, the next keys while values are added up.
  for (int step = 0; step < visits.steps; ++step) {
    const int j0 = visits.key(step);
    cp_async_wait<0>();
    __syncthreads();
    if (with_values)
      load_tile<Shape, Shape::kColumns>(
          v_tile, call.v, tile.batch, tile.kv_head, j0, call.length_k, call.value_width);
    cp_async_commit();
    A scores[Shape::kTiles][4];
    multiply_rows<Shape>(scores, q_tile + 16 * thread.warp * Shape::kStride, k_tile, call.width);
    const ScorePlace<false> place{tile.batch, tile.head, tile.i0 + thread.row, j0 + thread.column};
    finish_scores<T>(
        call, units, place, all_seen(call, tile.i0, Shape::kRows, j0, Shape::kColumns), scores);
    turn(scores, place);
    cp_async_wait<0>();
    __syncthreads();
    if (step + 1 < visits.steps) load_keys(step + 1);
    cp_async_commit();
    if (with_values) multiply_scores<Shape>(sums, scores, v_tile, call.value_width, staged);
  }
  cp_async_wait<0>();
}

}  // namespace fused_remat::cuda
