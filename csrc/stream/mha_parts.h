// What both passes of multi-head attention share: sizes, the plan of head groups and row chunks,
// and operands as the passes want them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "../head_transform.h"
#include "../mha_ops.h"
#include "heads.h"
#include "tiles.h"

namespace fused_remat {

enum Part { kQ, kK, kV, kParts };

struct MhaSizes {
  int64_t batch, length_q, length_k, extra;  // extra keys after those of `key`
  int64_t heads, kv_heads, width, value_width, d_out;

  int64_t keys() const { return length_k + extra; }
  int64_t repeats() const { return heads / kv_heads; }
  int64_t part_heads(int part) const { return part == kQ ? heads : kv_heads; }
  int64_t part_width(int part) const { return part == kV ? value_width : width; }
  int64_t part_columns(int part) const { return part_heads(part) * part_width(part); }
  int64_t part_length(int part) const { return part == kQ ? length_q : length_k; }
  // Rows of a part with its extra keys.
  int64_t full_length(int part) const { return part == kQ ? length_q : keys(); }
};

// One projection: rows of weight and bias for all heads, and the part whose input it shares (the
// first such, maybe itself).
struct Projection {
  at::Tensor weight;    // [heads, width, D], a view of the operand; heads may lie far apart
  OptionalTensor bias;  // [heads * width]
  int input = kQ;
  bool packs = false;  // not one dense matrix in the dtype of the products

  int64_t features() const { return weight.size(2); }
};

// Rows of a weight, whether it is [rows, D] or [heads, width, D].
int64_t weight_rows(const at::Tensor& weight);
// [heads, width, D] as the products take it, [heads * width, D]; undefined where that needs a copy.
at::Tensor ready_matrix(const at::Tensor& heads, at::ScalarType gemm);

// An input [B, L, D] as rows of a matrix, batch by batch, or position by position where that is how
// it lies in memory.
struct InputRows {
  at::Tensor rows;  // [B L, D]
  bool by_length = false;
  bool normalized = false;  // the norm stands between these rows and the projections
};

// How many key-value heads and how many token rows are handled at a time. By shapes, dtypes and the
// budget alone, and the same for forward and backward: both must make the same products.
struct MhaPlan {
  int64_t kv_heads;
  int64_t rows;
};

struct MhaGroup {
  int64_t kv0, kv_heads, head0, heads;

  int64_t first(int part) const { return part == kQ ? head0 : kv0; }
  int64_t count(int part) const { return part == kQ ? heads : kv_heads; }
};

struct MhaProblem {
  MhaProblem(const MhaOperands&, const MhaOptions&, const at::Tensor& seed);

  const MhaOperands& operands;
  const MhaOptions& options;
  const MhaSizes sizes;
  const MlpPrecision precision;
  std::array<Projection, kParts> projections;
  std::array<InputRows, kParts> inputs;  // those that a Projection::input names
  const Norm norm;
  std::array<HeadTransform, kParts> transforms;
  Attending attending;
  bool packs_rows, packs_w_out;
  MhaPlan plan;

  const InputRows& input_of(int part) const { return inputs[projections[part].input]; }
  bool by_length(int part) const { return input_of(part).by_length; }
  // Whether w_q and b_q hold the rows of all three parts.
  bool packed_weight() const { return !operands.w_k; }
  bool packed_bias() const;
  int64_t widest_rank() const;  // of the adapters, 0 without
  // Products are wider than what is made of them.
  bool rounds() const { return precision.gemm != precision.compute; }
  int64_t group_columns(const MhaGroup& g, int part) const {
    return g.count(part) * sizes.part_width(part);
  }
  // [B L, heads * width] as [B, heads, length, width], in the order of a part's rows.
  at::Tensor heads_of(const at::Tensor& rows, int part, int64_t length, int64_t width) const;
  // [B, L, columns] as rows in that order: a view where it lies so, else a copy.
  at::Tensor rows_of(const at::Tensor& t, int part) const;
  // A new [B, L, columns] that lies in that order.
  at::Tensor empty_rows(int part, int64_t columns, const at::TensorOptions&) const;
  // Whether a part's heads, as kept, are what attention takes.
  bool ready_as_kept(int part) const {
    return !transforms[part] && (part == kQ || sizes.extra == 0);
  }
  // Raises ValueError where what backward is given beside the operands does not fit them.
  void check_results(
      const OptionalTensor& dy, const OptionalTensor& dweights,
      const std::array<OptionalTensor, kMhaResiduals>& kept, const OptionalTensor& lse) const;
  // Bytes of all buffers for a plan, those that only one of the passes takes included.
  int64_t bytes(const MhaPlan&) const;

 private:
  void read_projections();
  void read_inputs();
  MhaPlan make_plan() const;
};

}  // namespace fused_remat
