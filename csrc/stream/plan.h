// How the streaming cuts [M, F] into tiles that fit the workspace. Decided from shapes, dtypes and
// the byte budget alone, never from free memory: every rank and every replay must cut alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace fused_remat {

// Bytes that a tile of [rows, features] takes in the workspace.
struct TileCost {
  int64_t element = 0;  // per rows * features
  int64_t row = 0;
  int64_t feature = 0;
  int64_t fixed = 0;
  int64_t partial_sum = 0;  // per feature and block of kSumBlockRows rows

  int64_t bytes(int64_t rows, int64_t features) const;
};

// Rows that one bias-gradient partial sum covers. Fixed, so that sums do not depend on the number
// of threads.
constexpr int64_t kSumBlockRows = 128;
// Start of every workspace buffer.
constexpr int64_t kWorkspaceAlignment = 64;

struct TilePlan {
  bool by_features;  // outer loop over feature chunks; else over token chunks
  int64_t rows;
  int64_t features;
  int64_t bytes;
};

// What the chunks of the outer loop are to be beyond 256 wide, where the budget allows it beside an
// inner direction that stays as wide and wider than a chunk.
struct TileGoal {
  int64_t width = 0;
  int64_t chunks = std::numeric_limits<int64_t>::max();
};
TileGoal tile_goal(bool on_cpu, bool backward);

// The largest tile within `budget` bytes (one row by one feature where even that exceeds it): wide
// in both directions before it is whole in one, and cut into equal chunks of a multiple of 8 (one
// chunk, or none of 8, aside).
TilePlan plan_tiles(
    int64_t rows, int64_t features, bool by_features, const TileGoal&, const TileCost&,
    int64_t budget);

struct MlpSizes {
  int64_t rows;             // M
  int64_t d_in;             // D
  int64_t d_out;            // Do
  int64_t hidden_features;  // F
  bool gated;
  // Ranks of the adapters, 0 where there is none.
  int64_t rank_up = 0;
  int64_t rank_gate = 0;
  int64_t rank_down = 0;

  int64_t weight_elements_per_feature() const { return d_in * (gated ? 2 : 1) + d_out; }
  int64_t ranks_in() const { return rank_up + rank_gate; }
  int64_t widest_rank() const { return std::max({rank_up, rank_gate, rank_down}); }
  bool adapted() const { return widest_rank() > 0; }
  // Row strides of x and dy as the tiles take them, with the columns of adapters (low_rank.h).
  int64_t x_stride() const { return with_columns(d_in, ranks_in()); }
  int64_t dy_stride() const { return with_columns(d_out, rank_down); }

  // Rows of odd widths keep the alignment that fast loads need.
  static int64_t with_columns(int64_t width, int64_t extra) {
    return extra == 0 ? width : (width + extra + 7) / 8 * 8;
  }
};

// compute: what pre-activations and y round to. gemm: dtype of the library GEMMs. accumulate: dtype
// of sums over tiles.
struct MlpPrecision {
  at::ScalarType compute;
  at::ScalarType gemm;
  at::ScalarType accumulate;
};
MlpPrecision mlp_precision(at::ScalarType compute, const std::string& backend, bool on_cpu);

// Operands that must be copied into the workspace tile by tile, for their dtype or their strides.
struct MlpPacking {
  bool x;
  bool dy;
  bool weights_in;  // w_up and w_gate
  bool w_down;
};

// What stage 1 of a backward pass does, by whom.
struct MlpStage1 {
  std::string backend;
  std::string activation;
  bool dropout;
  int64_t kept;  // features of pre-activations, up's and gate's together
};

// Feature chunks iff the fp32 dx [M, D] is smaller than the fp32 dW that token chunks would
// accumulate.
bool backward_by_features(const MlpSizes&);
TileCost forward_cost(
    const MlpSizes&, const MlpPrecision&, const MlpPacking&, const std::string& backend,
    bool dropout, bool norm);
TileCost backward_cost(
    const MlpSizes&, const MlpPrecision&, const MlpPacking&, const MlpStage1&,
    at::ScalarType x_dtype, at::ScalarType weight_dtype, bool norm);
// Bytes of the scratch tensor that the stage 1 of a backward tile is given.
int64_t backward_scratch(
    const MlpSizes&, const MlpPrecision&, const MlpStage1&, int64_t rows, int64_t features);

// The axis in the result of `mlp_plan` of a pass that one kernel makes without tiles (mlp_small.h);
// backward sums the gradients of parameters over so many rows at a time.
constexpr int64_t kOneKernel = 2;

// The op `mlp_plan`: {axis, rows, features, bytes} for operands that lie densely in memory. `ranks`
// of the adapters of w_up, w_gate and w_down; `kept` features of pre-activations, up's and gate's
// together.
std::vector<int64_t> mlp_plan(
    int64_t rows, int64_t d_in, int64_t d_out, int64_t hidden_features, bool gated, bool backward,
    bool dropout, at::ScalarType x_dtype, at::ScalarType weight_dtype, at::ScalarType compute_dtype,
    int64_t workspace, std::string backend, std::string device, bool norm, at::IntArrayRef ranks,
    std::string activation, int64_t kept);

}  // namespace fused_remat
