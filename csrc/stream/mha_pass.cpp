#include "mha_pass.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "heads.h"

namespace fused_remat {

using at::Tensor;

MhaPass::MhaPass(const MhaProblem& problem)
    : p_(problem),
      sizes_(problem.sizes),
      workspace_(problem.bytes(problem.plan), problem.operands.query.device()) {
  const MlpPrecision& precision = p_.precision;
  int64_t widest = p_.widest_rank(), widest_input = std::max(sizes_.d_out, widest);
  for (int part = 0; part < kParts; ++part) {
    const int64_t columns = most_columns(part), features = p_.projections[part].features();
    const int64_t elements = sizes_.batch * sizes_.full_length(part) * columns;
    part_buffers_[part] = take(true, elements, precision.compute);
    raw_buffers_[part] = take(p_.transforms[part].needs_raw(), elements, precision.compute);
    weight_buffers_[part] = take(p_.projections[part].packs, columns * features, precision.gemm);
    widest = std::max(widest, columns);
    widest_input = std::max(widest_input, features);
    adapters_[part] = InputAdapter(
        p_.operands.adapters[part], p_.options.adapter_scales[part], precision,
        sizes_.batch * sizes_.part_length(part));
  }
  out_adapter_ = OutputAdapter(
      p_.operands.adapters[kAdaptOut], p_.options.adapter_scales[kAdaptOut], precision,
      sizes_.batch * sizes_.length_q);
  const int64_t out_columns = p_.plan.kv_heads * sizes_.repeats() * sizes_.value_width;
  widest = std::max(widest, out_columns);
  w_out_buffer_ = take(p_.packs_w_out, sizes_.d_out * out_columns, precision.gemm);
  chunk_buffer_ = take(p_.packs_rows, p_.plan.rows * widest_input, precision.gemm);
  const bool products = p_.rounds() || precision.gemm != precision.accumulate;
  factor_buffer_ = take(products, p_.plan.rows * widest, precision.gemm);
  product_buffer_ = take(products, std::max(p_.plan.rows, widest) * widest_input, precision.gemm);
}

Tensor MhaPass::take(bool needed, int64_t numel, at::ScalarType dtype) {
  return needed ? workspace_.take(numel, dtype) : Tensor();
}

Tensor MhaPass::part_rows(const Tensor& flat, const MhaGroup& g, int part) const {
  return matrix(flat, sizes_.batch * sizes_.full_length(part), p_.group_columns(g, part));
}

Tensor MhaPass::input_chunk(int input, int64_t r0, int64_t rows) {
  const InputRows& from = p_.inputs[input];
  const Tensor part = from.rows.narrow(0, r0, rows);
  if (!from.normalized) return packed_rows(part);
  Tensor chunk = matrix(chunk_buffer_, rows, part.size(1));
  calls::normalize_rows(p_.options.backend, part, p_.norm, p_.precision.compute, chunk);
  return chunk;
}

Tensor MhaPass::packed_rows(const Tensor& rows) {
  const bool ready = rows.scalar_type() == p_.precision.gemm && has_dense_rows(rows);
  return ready ? rows : packed(rows, chunk_buffer_);
}

Tensor MhaPass::packed_factor(const Tensor& rows) {
  return rows.scalar_type() == p_.precision.gemm ? rows : packed(rows, factor_buffer_);
}

void MhaPass::load_weights(const MhaGroup& g) {
  for (int part = 0; part < kParts; ++part) {
    const Tensor heads = p_.projections[part].weight.narrow(0, g.first(part), g.count(part));
    weights_[part] = ready_matrix(heads, p_.precision.gemm);
    if (weights_[part].defined()) continue;
    weights_[part] =
        matrix(weight_buffers_[part], p_.group_columns(g, part), p_.projections[part].features());
    weights_[part].view(heads.sizes()).copy_(heads);
  }
  w_out_ = packed(
      p_.operands.w_out.narrow(1, g.head0 * sizes_.value_width, g.heads * sizes_.value_width),
      w_out_buffer_);
}

void MhaPass::project(
    const Tensor& x, int part, const MhaGroup& g, int64_t r0, const Tensor& target) {
  const OptionalTensor& bias = p_.projections[part].bias;
  Tensor product = p_.rounds() ? matrix(factor_buffer_, target.size(0), target.size(1)) : target;
  const Tensor w = weights_[part].t();
  if (bias) {
    product.copy_(
        bias->narrow(0, first_column(g, part), target.size(1)).unsqueeze(0).expand_as(product));
    at::addmm_out(product, product, x, w);
  } else {
    at::mm_out(product, x, w);
  }
  if (adapters_[part]) {
    if (is_first(g)) adapters_[part].reduce(x, r0);
    adapters_[part].expand(product, r0, first_column(g, part));
  }
  if (p_.rounds()) Tensor(target).copy_(product);
}

void MhaPass::fill_extra(const MhaGroup& g, int part, const Tensor& heads) {
  if (part == kQ || sizes_.extra == 0) return;
  const OptionalTensor& bias = part == kK ? p_.operands.bias_k : p_.operands.bias_v;
  int64_t next = sizes_.length_k;
  if (bias) {
    const Tensor own =
        bias->view({sizes_.kv_heads, sizes_.part_width(part)}).narrow(0, g.kv0, g.kv_heads);
    heads.select(2, next++).copy_(
        own.unsqueeze(0).expand({sizes_.batch, g.kv_heads, sizes_.part_width(part)}));
  }
  if (p_.options.add_zero_attn) heads.select(2, next).zero_();
}

void MhaPass::make_heads(
    const MhaGroup& g, const std::array<OptionalTensor, kMhaResiduals>& kept,
    const std::array<Tensor, kMhaResiduals>* keep_to) {
  const auto is_kept = [&](int part) { return kept[part].has_value(); };
  std::array<Tensor, kParts> rows;
  for (int part = 0; part < kParts; ++part) rows[part] = part_rows(part_buffers_[part], g, part);
  for (int input = 0; input < kParts; ++input) {
    std::vector<int> parts;
    for (int part = 0; part < kParts; ++part)
      if (p_.projections[part].input == input && !is_kept(part)) parts.push_back(part);
    if (parts.empty()) continue;
    for_each_chunk(input, [&](int64_t r0, int64_t n, int64_t to) {
      const Tensor x = input_chunk(input, r0, n);
      for (const int part : parts)
        project(x, part, g, r0, rows[part].narrow(0, part == kQ ? r0 : to, n));
    });
  }
  for (int part = 0; part < kParts; ++part) {
    const int64_t width = sizes_.part_width(part), length = sizes_.part_length(part);
    heads_[part] = p_.heads_of(rows[part], part, sizes_.full_length(part), width);
    Tensor own = heads_[part].narrow(2, 0, length);  // without extra keys
    if (is_kept(part)) {
      const Tensor mine = kept[part]->narrow(2, g.first(part), g.count(part)).permute({0, 2, 1, 3});
      if (p_.ready_as_kept(part)) {
        heads_[part] = mine;
        continue;
      }
      own.copy_(mine);
    }
    if (keep_to != nullptr && (*keep_to)[part].numel() > 0)
      (*keep_to)[part].narrow(2, g.first(part), g.count(part)).copy_(own.permute({0, 2, 1, 3}));
    if (!p_.transforms[part]) {
      fill_extra(g, part, heads_[part]);
      continue;
    }
    if (p_.transforms[part].needs_raw()) {
      raw_[part] =
          p_.heads_of(part_rows(raw_buffers_[part], g, part), part, sizes_.full_length(part), width)
              .narrow(2, 0, length);
      raw_[part].copy_(own);
    }
    calls::transform_heads(p_.options.backend, own, p_.transforms[part], p_.attending.scratch);
    fill_extra(g, part, heads_[part]);
  }
}

}  // namespace fused_remat
