#include "mha_parts.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "checks.h"
#include "heads.h"

namespace fused_remat {

using at::Tensor;

namespace {

MhaSizes sizes_of(const MhaOperands& o, const MhaOptions& options, const Tensor& seed) {
  check_mha(o, options, seed);
  const Tensor& key = o.key ? *o.key : o.query;
  MhaSizes sizes{};
  sizes.batch = o.query.size(0);
  sizes.length_q = o.query.size(1);
  sizes.length_k = key.size(1);
  sizes.extra = (o.bias_k ? 1 : 0) + (options.add_zero_attn ? 1 : 0);
  sizes.heads = options.num_heads;
  sizes.kv_heads = options.num_kv_heads;
  sizes.value_width = o.w_out.size(1) / options.num_heads;
  sizes.d_out = o.w_out.size(0);
  const int64_t rows = weight_rows(o.w_q);
  sizes.width = o.w_k
                    ? rows / sizes.heads
                    : (rows - sizes.kv_heads * sizes.value_width) / (sizes.heads + sizes.kv_heads);
  return sizes;
}

// Which order of [B, L, D] makes rows without a copy.
bool lies_by_length(const Tensor& x) {
  const auto collapses = [](const Tensor& t) {
    return t.size(0) == 1 || t.size(1) == 1 || t.stride(0) == t.size(1) * t.stride(1);
  };
  return !collapses(x) && collapses(x.transpose(0, 1));
}

bool lies_ready(const Tensor& rows, at::ScalarType gemm) {
  return rows.scalar_type() == gemm && (rows.numel() == 0 || has_dense_rows(rows));
}

}  // namespace

int64_t weight_rows(const Tensor& weight) {
  return weight.dim() == 3 ? weight.size(0) * weight.size(1) : weight.size(0);
}

Tensor ready_matrix(const Tensor& heads, at::ScalarType gemm) {
  const bool collapses = heads.size(0) == 1 || heads.size(1) == 1 ||
                         heads.stride(0) == heads.size(1) * heads.stride(1);
  if (!collapses) return {};
  const Tensor rows = heads.flatten(0, 1);
  return lies_ready(rows, gemm) ? rows : Tensor();
}

MhaProblem::MhaProblem(const MhaOperands& o, const MhaOptions& opt, const Tensor& seed)
    : operands(o),
      options(opt),
      sizes(sizes_of(o, opt, seed)),
      precision(mlp_precision(opt.compute_dtype, opt.backend, o.query.is_cpu())),
      norm{opt.norm, o.norm_weight, o.norm_bias, opt.norm_eps} {
  read_projections();
  read_inputs();
  for (const int part : {kQ, kK})
    transforms[part] = {
        part == kQ ? o.q_norm : o.k_norm, opt.qk_norm_eps, o.cos, o.sin, opt.rotary_interleaved};
  attending.attn_mask = readable_mask(o.attn_mask, precision.accumulate);
  attending.key_mask = readable_mask(key_mask_view(o.key_mask), precision.accumulate);
  attending.seed = seed;
  attending.band =
      band_of(opt.causal, opt.window_left, opt.window_right, sizes.length_q, sizes.length_k);
  attending.extra_keys = sizes.extra;
  attending.dropout_p = opt.dropout_p;
  attending.scale = opt.scale;
  attending.softcap = opt.softcap;
  attending.num_heads = sizes.heads;
  attending.scratch = tile_scratch(opt.workspace);
  packs_rows = bool(norm) || rounds();
  packs_w_out = !lies_ready(o.w_out, precision.gemm);
  for (Projection& p : projections) {
    packs_rows = packs_rows || !lies_ready(inputs[p.input].rows, precision.gemm);
    p.packs = !ready_matrix(p.weight, precision.gemm).defined();
  }
  plan = make_plan();
}

bool MhaProblem::packed_bias() const {
  return operands.b_q && operands.b_q->numel() != sizes.part_columns(kQ);
}

int64_t MhaProblem::widest_rank() const {
  int64_t rank = 0;
  for (const AdapterFactors& adapter : operands.adapters)
    if (adapter.a) rank = std::max(rank, adapter.a->size(0));
  return rank;
}

void MhaProblem::read_projections() {
  const MhaOperands& o = operands;
  const OptionalTensor weights[] = {o.w_q, o.w_k, o.w_v}, biases[] = {o.b_q, o.b_k, o.b_v};
  int64_t first = 0;
  for (int part = 0; part < kParts; ++part) {
    const int64_t rows = sizes.part_columns(part);
    Projection& p = projections[part];
    const Tensor weight = packed_weight() ? o.w_q.narrow(0, first, rows) : *weights[part];
    p.weight = weight.dim() == 3
                   ? weight
                   : weight.unflatten(0, {sizes.part_heads(part), sizes.part_width(part)});
    if (packed_bias())
      p.bias = o.b_q->narrow(0, first, rows);
    else if (biases[part])
      p.bias = biases[part]->flatten();
    first += rows;
  }
  projections[kK].input = o.key ? kK : kQ;
  projections[kV].input = o.value ? kV : projections[kK].input;
}

void MhaProblem::read_inputs() {
  const OptionalTensor given[] = {operands.query, operands.key, operands.value};
  for (int part = 0; part < kParts; ++part) {
    if (!given[part]) continue;
    InputRows& input = inputs[part];
    input.by_length = lies_by_length(*given[part]);
    const Tensor ordered = input.by_length ? given[part]->transpose(0, 1) : *given[part];
    input.rows = ordered.reshape({ordered.size(0) * ordered.size(1), ordered.size(2)});
    input.normalized = part == kQ && bool(norm);
  }
}

Tensor MhaProblem::heads_of(const Tensor& rows, int part, int64_t length, int64_t width) const {
  const int64_t heads = width == 0 ? sizes.part_heads(part) : rows.size(1) / width;
  const int64_t row = rows.stride(0);
  // By strides, because columns may be a slice of wider rows.
  return by_length(part)
             ? rows.as_strided(
                   {sizes.batch, heads, length, width}, {row, width, row * sizes.batch, 1})
             : rows.as_strided({sizes.batch, heads, length, width}, {row * length, width, row, 1});
}

Tensor MhaProblem::rows_of(const Tensor& t, int part) const {
  const Tensor ordered = by_length(part) ? t.transpose(0, 1) : t;
  return ordered.reshape({ordered.size(0) * ordered.size(1), ordered.size(2)});
}

Tensor MhaProblem::empty_rows(int part, int64_t columns, const at::TensorOptions& to) const {
  const int64_t length = sizes.part_length(part);
  return by_length(part) ? at::empty({length, sizes.batch, columns}, to).transpose(0, 1)
                         : at::empty({sizes.batch, length, columns}, to);
}

int64_t MhaProblem::bytes(const MhaPlan& p) const {
  const auto size = [](at::ScalarType t) { return static_cast<int64_t>(c10::elementSize(t)); };
  const int64_t compute = size(precision.compute), gemm = size(precision.gemm);
  const int64_t wide = size(precision.accumulate);
  const bool sums_weights = operands.w_q.scalar_type() != precision.accumulate;
  int64_t total = 0;
  const auto add = [&total](int64_t bytes) {
    total += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  };
  const MhaGroup g{0, p.kv_heads, 0, p.kv_heads * sizes.repeats()};
  const int64_t rows_q = sizes.batch * sizes.length_q;
  int64_t widest = std::max(g.heads * sizes.value_width, widest_rank());
  int64_t widest_input = std::max(sizes.d_out, widest_rank());
  for (int part = 0; part < kParts; ++part) {
    const int64_t columns = group_columns(g, part);
    const int64_t elements = sizes.batch * sizes.full_length(part) * columns;
    const int64_t features = projections[part].features();
    add(elements * compute);                                    // q, k or v
    if (transforms[part].needs_raw()) add(elements * compute);  // before its norm
    add(elements * wide);                                       // its gradient
    if (projections[part].packs) add(columns * features * gemm);
    if (sums_weights) add(columns * features * wide);
    widest = std::max(widest, columns);
    widest_input = std::max(widest_input, features);
  }
  const int64_t out_columns = g.heads * sizes.value_width;
  add(rows_q * out_columns * compute);  // dout
  if (!options.keep[kResidualOut]) add(rows_q * out_columns * compute);
  if (packs_w_out) add(sizes.d_out * out_columns * gemm);
  if (sums_weights) add(sizes.d_out * out_columns * wide);
  for (int i = 0; i < 2; ++i)  // delta and the correction of lse
    add(sizes.batch * g.heads * sizes.length_q * wide);
  // Chunks of rows: an input or dy, and a product.
  if (packs_rows) add(p.rows * widest_input * gemm);
  if (rounds() || precision.gemm != precision.accumulate) {
    add(p.rows * widest * gemm);
    add(std::max(p.rows, widest) * widest_input * gemm);
  }
  if (norm) total += p.rows * norm_bytes_per_row(projections[kQ].features(), precision.accumulate);
  return total;
}

MhaPlan MhaProblem::make_plan() const {
  const int64_t budget = options.workspace - tile_scratch(options.workspace);
  const int64_t all = sizes.kv_heads;
  const int64_t rows =
      std::max<int64_t>({sizes.batch * sizes.length_q, sizes.batch * sizes.length_k, 1});
  MhaPlan p{all, rows};
  if (packs_rows || rounds() || precision.gemm != precision.accumulate) {
    // Chunks of a few rows cost more time than heads cost bytes: rows come first, up to a share.
    constexpr int64_t kShare = 8, kSample = 64;
    const int64_t row = (bytes({1, kSample}) - bytes({1, 0})) / kSample;
    p.rows = std::clamp<int64_t>(options.workspace / kShare / std::max<int64_t>(row, 1), 1, rows);
  }
  while (p.kv_heads > 1 && bytes(p) > budget) --p.kv_heads;
  const int64_t groups = (all + p.kv_heads - 1) / p.kv_heads;
  p.kv_heads = (all + groups - 1) / groups;
  while (p.rows < rows && bytes({p.kv_heads, std::min(rows, 2 * p.rows)}) <= budget)
    p.rows = std::min(rows, 2 * p.rows);
  return p;
}

void MhaProblem::check_results(
    const OptionalTensor& dy, const OptionalTensor& dweights,
    const std::array<OptionalTensor, kMhaResiduals>& kept, const OptionalTensor& lse) const {
  const MhaSizes& s = sizes;
  check_shape("dy", dy, {s.batch, s.length_q, s.d_out});
  if (options.need_weights == kAveragedWeights)
    check_shape("dweights", dweights, {s.batch, s.length_q, s.keys()});
  else
    check_shape("dweights", dweights, {s.batch, s.heads, s.length_q, s.keys()});
  for (int part = 0; part < kParts; ++part)
    check_shape(
        "a kept projection", kept[part],
        {s.batch, s.part_length(part), s.part_heads(part), s.part_width(part)});
  check_shape("out", kept[kResidualOut], {s.batch, s.length_q, s.heads, s.value_width});
  check_shape("lse", lse, {s.batch, s.heads, s.length_q});
  TORCH_CHECK_VALUE(
      lse || s.batch * s.length_q == 0, "multi_head_attention_bwd: lse must be given");
}

std::vector<int64_t> mha_plan(const MhaOperands& operands, const MhaOptions& options) {
  const MhaProblem problem(operands, options, at::empty({1}, at::kLong));
  return {problem.plan.kv_heads, problem.plan.rows, problem.bytes(problem.plan)};
}

}  // namespace fused_remat
