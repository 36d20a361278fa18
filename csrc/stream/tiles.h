// What the streaming passes share: the workspace, operands of a tile, and sums of products over
// tiles.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../mlp.h"
#include "plan.h"

namespace fused_remat {

// What forward captured decides the dtypes: an autocast region around backward must not cast
// anything.
struct BelowAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// One scratch buffer, carved into flat pieces that live as long as the pass.
class Workspace {
 public:
  Workspace(int64_t bytes, at::Device device);
  // Flat [numel]; contents are undefined.
  at::Tensor take(int64_t numel, at::ScalarType dtype);

 private:
  at::Tensor bytes_;
  int64_t used_ = 0;
};

// The first elements of a flat buffer as a dense [rows, cols].
at::Tensor matrix(const at::Tensor& flat, int64_t rows, int64_t cols);

// M of x [..., D].
int64_t row_count(const at::Tensor& x);
// x [..., D] as [M, D]: a view where the strides allow one, else a copy (an x whose leading dims do
// not collapse).
at::Tensor as_rows(const at::Tensor& x);

// Whether a GEMM and the tile ops take the matrix as it lies: last dim dense (or, for a weight,
// either dim).
bool has_dense_rows(const at::Tensor& matrix);
bool is_dense_weight(const at::Tensor& weight);

// `tile` itself when `flat` is undefined, else its copy in `flat`, in the dtype of `flat`.
at::Tensor packed(const at::Tensor& tile, const at::Tensor& flat);

// Rows of x as the products take them: normalised where there is a norm, packed where a buffer is
// given.
at::Tensor ready_rows(
    const std::string& backend, const at::Tensor& rows, const Norm&, const MlpPrecision&,
    const at::Tensor& flat);

// The columns of a residual [M, kept] that belong to the tile: [rows, 0..features].
at::Tensor residual_tile(
    const at::Tensor& residual, int64_t row0, int64_t rows, int64_t feature0, int64_t features);

// The weights of the features [feature0, feature0 + features), packed where that is asked for. With
// adapters of the input's projections w_up is [w_up, b of up, 0] and w_gate is [w_gate, 0, b of
// gate]; `down_rows` appends a of the down adapter to the rows of w_down.
class WeightTiles {
 public:
  WeightTiles(
      const MlpLayer& layer, const MlpSizes& sizes, const MlpPacking& packing, bool down_rows,
      int64_t features, at::ScalarType gemm, Workspace& workspace);
  const MlpLayer& tile(int64_t feature0, int64_t features);

 private:
  at::Tensor tile_in(
      const at::Tensor& w, const LowRank& adapter, int64_t column, const at::Tensor& flat) const;
  at::Tensor tile_down() const;

  const MlpLayer& layer_;
  const MlpSizes& sizes_;
  const bool down_rows_;
  at::Tensor w_up_, w_gate_, w_down_;
  // The tile that was asked for last.
  MlpLayer tile_;
  int64_t feature0_ = -1, features_ = -1;
};

// out = a b, or out += a b; where `out` has another dtype than a, through `flat_product`, unless
// the device's library adds such products itself.
void add_product(
    const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool first,
    const at::Tensor& flat_product);

MlpSizes mlp_sizes(const at::Tensor& x, const MlpLayer&);
bool dense_weights(const MlpLayer&, at::ScalarType gemm);
// Raises ValueError-like c10::Error where shapes, dtypes or devices do not fit together.
void check_mlp(const at::Tensor& x, const MlpLayer&, const at::Tensor& seed, const MlpOptions&);

}  // namespace fused_remat
