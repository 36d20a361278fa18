// The machinery of both passes of multi-head attention: buffers, chunks of rows, projections.
#pragma once

#include "mha_adapters.h"
#include "mha_parts.h"

namespace fused_remat {

class MhaPass {
 protected:
  explicit MhaPass(const MhaProblem& problem);

  template <class Body>
  void for_each_group(const Body& body) const {
    for (int64_t kv0 = 0; kv0 < sizes_.kv_heads; kv0 += p_.plan.kv_heads) {
      const int64_t kv = std::min(p_.plan.kv_heads, sizes_.kv_heads - kv0);
      body(MhaGroup{kv0, kv, kv0 * sizes_.repeats(), kv * sizes_.repeats()});
    }
  }
  // body(first row, rows, the same row among those of keys with extra ones) over an input.
  template <class Body>
  void for_each_chunk(int part, const Body& body) const {
    const int64_t length = sizes_.part_length(part), rows = sizes_.batch * length;
    const bool gaps = sizes_.extra > 0 && !p_.by_length(part);
    for (int64_t r0 = 0, n = 0; r0 < rows; r0 += n) {
      n = std::min(p_.plan.rows, rows - r0);
      if (gaps) n = std::min(n, length - r0 % length);
      body(r0, n, gaps ? r0 + r0 / length * sizes_.extra : r0);
    }
  }

  // Rows of an input, normalised and in the dtype of the products.
  at::Tensor input_chunk(int input, int64_t r0, int64_t rows);
  // `rows` of any matrix in the dtype of the products.
  at::Tensor packed_rows(const at::Tensor& rows);
  // The same into the product buffer, for what is not an input.
  at::Tensor packed_factor(const at::Tensor& rows);
  // The weight rows (out: columns) of a group, in the dtype of the products.
  void load_weights(const MhaGroup& g);

  // q, k and v of the group as attention takes them, projected or from what was kept. With
  // `keep_to` of forward, their projections are also written there.
  void make_heads(
      const MhaGroup& g, const std::array<OptionalTensor, kMhaResiduals>& kept,
      const std::array<at::Tensor, kMhaResiduals>* keep_to);

  bool is_first(const MhaGroup& g) const { return g.kv0 == 0; }
  bool is_last(const MhaGroup& g) const { return g.kv0 + g.kv_heads == sizes_.kv_heads; }
  int64_t first_column(const MhaGroup& g, int part) const {
    return g.first(part) * sizes_.part_width(part);
  }
  at::Tensor take(bool needed, int64_t numel, at::ScalarType dtype);
  at::Tensor part_rows(const at::Tensor& flat, const MhaGroup& g, int part) const;
  int64_t most_columns(int part) const {
    return p_.plan.kv_heads * (part == kQ ? sizes_.repeats() : 1) * sizes_.part_width(part);
  }

  const MhaProblem& p_;
  const MhaSizes& sizes_;
  Workspace workspace_;
  std::array<at::Tensor, kParts> weights_;  // of the group
  at::Tensor w_out_;
  std::array<InputAdapter, kParts> adapters_;
  OutputAdapter out_adapter_;
  std::array<at::Tensor, kParts> heads_;  // of the group, [B, heads, length, width]
  std::array<at::Tensor, kParts> raw_;    // before their norm, where they have one

 private:
  void project(
      const at::Tensor& x, int part, const MhaGroup& g, int64_t r0, const at::Tensor& target);
  void fill_extra(const MhaGroup& g, int part, const at::Tensor& heads);

  // Flat workspace pieces; undefined where not needed.
  std::array<at::Tensor, kParts> part_buffers_, raw_buffers_, weight_buffers_;
  at::Tensor w_out_buffer_, chunk_buffer_;

 protected:
  at::Tensor factor_buffer_, product_buffer_;
};

}  // namespace fused_remat
