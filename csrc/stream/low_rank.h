// Low-rank adapters in the streaming passes: up = n w_up^T + s (n a^T) b^T, likewise gate and down.
//
// Stage 1 of a tile takes operands with the adapters in them, so that level 3 knows nothing of
// adapters: rows [n, s n a_up^T, s n a_gate^T] meet weights [w_up, b_up, 0] and [w_gate, 0, b_gate]
// (WeightTiles), rows [dy, s dy b_down] meet [w_down; a_down]. Everything else is products of the
// narrow columns. docs/math.md, section "Low-rank adapters".
#pragma once

#include <array>

#include "gradient_sum.h"
#include "tiles.h"

namespace fused_remat {

// The factors that whole rows are multiplied with, in the GEMM dtype; undefined where absent.
struct RowFactors {
  RowFactors(const MlpLayer&, at::ScalarType gemm, Workspace&);

  at::Tensor up_a;    // [r, D]
  at::Tensor gate_a;  // [r, D]
  at::Tensor down_b;  // [Do, r]
};

// Rows of x as stage 1 takes them; `flat` has room for rows of sizes.x_stride().
at::Tensor rows_with_adapters(
    const std::string& backend, const at::Tensor& rows, const Norm&, const MlpPrecision&,
    const MlpLayer&, const MlpSizes&, const RowFactors&, const at::Tensor& flat);
// Rows of dy as stage 1 takes them; `flat` has room for rows of sizes.dy_stride().
at::Tensor gradient_rows_with_adapters(
    const at::Tensor& rows, const MlpLayer&, const MlpSizes&, const RowFactors&,
    const at::Tensor& flat);

// What the down adapter adds to rows of y, whose narrow product sums over feature tiles.
class DownAdapter {
 public:
  DownAdapter(
      const MlpLayer&, const MlpSizes&, const MlpPrecision&, const RowFactors&, const TilePlan&,
      Workspace&);
  void add_tile(
      const at::Tensor& hidden, int64_t feature0, bool first, const at::Tensor& product) const;
  // y += s low b^T, once all features are in.
  void finish(const at::Tensor& y, const at::Tensor& product) const;

 private:
  const LowRank& adapter_;
  const at::Tensor b_;
  at::Tensor a_tile_, low_, cast_;  // flat workspace pieces; undefined where not needed
};

// The gradients of the factors, and the share of dx that flows through the factors a of up and
// gate. Their fp32 sums are tensors of their own beside the workspace: of the size of the factors,
// and with an outer loop over features of M r elements for each adapter.
class AdapterGradients {
 public:
  AdapterGradients(
      const MlpLayer&, const MlpSizes&, const MlpPrecision&, const MlpGradientMask& wanted,
      bool wants_x, const TilePlan&, const MlpGradients& gradients, const RowFactors&, Workspace&);

  // x, dy and weights as stage 1 took them, what it made of them, and the tile's place.
  struct Tile {
    const at::Tensor &x, &dy;
    const MlpLayer& weights;
    const MlpBuffers& made;
    int64_t row0, feature0;
  };
  void add_tile(const Tile&, const at::Tensor& product) const;
  // Whether there is anything to finish.
  bool takes_rows() const { return up_.dlow.defined() || gate_.dlow.defined() || low_.defined(); }
  // Rows [row0, ...) of x and dy, whose features are all in. dx is undefined where not wanted.
  void finish_rows(
      const at::Tensor& x, const at::Tensor& dy, int64_t row0, const at::Tensor& dx,
      const at::Tensor& product) const;
  void finish() const;

 private:
  // The adapter of up or of gate.
  struct Input {
    double scale = 1.0;
    int64_t column = 0, rank = 0;  // of its columns in rows and weights
    at::Tensor a;                  // [r, D] in the GEMM dtype
    at::Tensor dlow;               // sums over features of the gradient of those columns
    GradientSum da, db;
  };
  at::Tensor rows_of(const at::Tensor& sums, int64_t row0, int64_t rows, int64_t rank) const;
  // scale * sums, in the GEMM dtype.
  at::Tensor scaled(const at::Tensor& sums, double scale) const;
  void add_input(
      const Input&, const Tile&, const at::Tensor& w, const at::Tensor& dpre,
      const at::Tensor& product) const;

  const MlpSizes& sizes_;
  const TilePlan& plan_;
  Input up_, gate_;
  double down_scale_;
  at::Tensor low_;  // sums over features of hidden a^T of down
  GradientSum ddown_a_, ddown_b_;
  at::Tensor cast_;
};

}  // namespace fused_remat
