#include "checks.h"

#include <c10/util/Exception.h>

#include "mha_parts.h"

namespace fused_remat {

using at::Tensor;

namespace {

void check_dropout(double dropout_p, const Tensor& seed) {
  TORCH_CHECK_VALUE(
      dropout_p >= 0.0 && dropout_p < 1.0, "attention: dropout_p must be in [0, 1), got ",
      dropout_p);
  TORCH_CHECK_VALUE(
      dropout_p == 0.0 || (seed.numel() == 1 && seed.scalar_type() == at::kLong),
      "attention: dropout needs an int64 seed of 1 element, got ", seed.numel(), " elements of ",
      seed.scalar_type());
}

// Within what a float divides by and multiplies with safely.
void check_softcap(double softcap) {
  TORCH_CHECK_VALUE(
      softcap == 0.0 || (softcap >= 1e-30 && softcap <= 1e30),
      "attention: softcap must be in [1e-30, 1e30], or 0 for none, got ", softcap);
}

void check_masks(
    const OptionalTensor& attn_mask, const OptionalTensor& key_mask, at::IntArrayRef full,
    at::Device device) {
  for (const OptionalTensor& mask : {attn_mask, key_mask}) {
    TORCH_CHECK_TYPE(
        !mask || mask->scalar_type() == at::kBool || at::isFloatingType(mask->scalar_type()),
        "attention: masks are bool or floating point, got ", mask->scalar_type());
    TORCH_CHECK_VALUE(
        !mask || mask->device() == device, "attention: masks must be on ", device, ", got ",
        mask->device());
  }
  for (int64_t dim = 0; attn_mask && dim < 4; ++dim)
    TORCH_CHECK_VALUE(
        attn_mask->dim() == 4 && (attn_mask->size(dim) == 1 || attn_mask->size(dim) == full[dim]),
        "attention: attn_mask must be 4-D and broadcast to ", full, ", got ", attn_mask->sizes());
  check_shape("key_mask", key_mask, {full[0], full[3]});
}

void check_matrix(const char* name, const OptionalTensor& t, bool by_heads = false) {
  TORCH_CHECK_VALUE(
      !t || t->dim() == 2 || (by_heads && t->dim() == 3), "multi_head_attention: ", name,
      " must be [out, in]", by_heads ? " or [heads, width, in]" : "", ", got ", t->sizes());
}

// Rows of a projection, or by heads, [heads, width], with what follows.
void check_projection(
    const char* name, const OptionalTensor& t, int64_t heads, int64_t width,
    std::vector<int64_t> rest) {
  const bool by_heads = t && t->dim() == static_cast<int64_t>(rest.size()) + 2;
  std::vector<int64_t> shape =
      by_heads ? std::vector<int64_t>{heads, width} : std::vector<int64_t>{heads * width};
  shape.insert(shape.end(), rest.begin(), rest.end());
  check_shape(name, t, shape);
}

void check_adapter(const AdapterFactors& adapter, int64_t in, int64_t out) {
  TORCH_CHECK_VALUE(
      adapter.a.has_value() == adapter.b.has_value() && (!adapter.a || adapter.a->dim() == 2),
      "multi_head_attention: an adapter has a [r, in] and b [out, r], or neither");
  if (!adapter.a) return;
  const int64_t rank = adapter.a->size(0);
  check_shape("a of an adapter", adapter.a, {rank, in});
  check_shape("b of an adapter", adapter.b, {out, rank});
}

void check_inputs(const Tensor& query, const Tensor& key, const Tensor& value) {
  for (const Tensor& x : {query, key, value})
    TORCH_CHECK_VALUE(
        x.dim() == 3 && x.size(0) == query.size(0),
        "multi_head_attention: inputs must be [B, L, D] of one batch size, got ", x.sizes());
  TORCH_CHECK_VALUE(
      key.size(1) == value.size(1),
      "multi_head_attention: key and value must have one length, got ", key.size(1), " and ",
      value.size(1));
}

// `width` of a head of queries and keys.
void check_norms_and_rotations(const MhaOperands& o, int64_t width, int64_t length_k) {
  for (const OptionalTensor& t : {o.norm_weight, o.norm_bias})
    check_shape("a weight or bias of the norm", t, {o.query.size(2)});
  for (const OptionalTensor& t : {o.q_norm, o.k_norm}) check_shape("q_norm and k_norm", t, {width});
  for (const OptionalTensor& t : {o.cos, o.sin})
    TORCH_CHECK_VALUE(
        !t || (t->dim() == 3 && t->sizes() == o.cos->sizes() && length_k == o.query.size(1) &&
               (t->size(0) == 1 || t->size(0) == o.query.size(0)) &&
               t->size(1) == o.query.size(1) && t->size(2) % 2 == 0 && t->size(2) <= width),
        "multi_head_attention: cos and sin must be [1 or B, L, R], got ", t->sizes());
}

}  // namespace

void check_shape(const char* name, const OptionalTensor& t, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(
      !t || t->sizes() == shape, "attention: ", name, " must be ", shape, ", got ", t->sizes());
}

void check_wanted(const std::vector<OptionalTensor>& operands, at::ArrayRef<bool> wanted) {
  TORCH_CHECK_VALUE(
      wanted.size() == operands.size(), "output_mask must have ", operands.size(), " entries, got ",
      wanted.size());
  for (size_t i = 0; i < operands.size(); ++i)
    TORCH_CHECK_VALUE(
        !wanted[i] || operands[i], "output_mask asks for the gradient of operand ", i,
        ", which was not given");
}

void check_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& attn_mask,
    const OptionalTensor& key_mask, const AttentionOptions& options, const Tensor& seed) {
  TORCH_CHECK_VALUE(
      q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
      "attention: q, k and v must be [B, heads, length, width]");
  TORCH_CHECK_VALUE(
      k.size(0) == q.size(0) && v.size(0) == q.size(0) && k.size(3) == q.size(3) &&
          v.size(1) == k.size(1) && v.size(2) == k.size(2) && k.size(1) > 0 &&
          q.size(1) % k.size(1) == 0,
      "attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit together");
  check_dropout(options.dropout_p, seed);
  check_softcap(options.softcap);
  check_masks(attn_mask, key_mask, {q.size(0), q.size(1), q.size(2), k.size(2)}, q.device());
}

void check_mha(const MhaOperands& o, const MhaOptions& options, const Tensor& seed) {
  const Tensor &key = o.key ? *o.key : o.query, &value = o.value ? *o.value : key;
  check_inputs(o.query, key, value);
  const int64_t heads = options.num_heads, kv_heads = options.num_kv_heads;
  TORCH_CHECK_VALUE(
      heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
      "multi_head_attention: num_kv_heads must divide num_heads, got ", heads, " and ", kv_heads);
  check_matrix("w_q", o.w_q, /*by_heads=*/o.w_k.has_value());
  check_matrix("w_k", o.w_k, /*by_heads=*/true);
  check_matrix("w_v", o.w_v, /*by_heads=*/true);
  check_matrix("w_out", o.w_out);
  TORCH_CHECK_VALUE(
      o.w_k.has_value() == o.w_v.has_value() && o.bias_k.has_value() == o.bias_v.has_value() &&
          o.cos.has_value() == o.sin.has_value(),
      "multi_head_attention: w_k and w_v, bias_k and bias_v, cos and sin go together");
  TORCH_CHECK_VALUE(
      o.w_out.size(1) % heads == 0, "multi_head_attention: w_out must be [Do, H Ev], got ",
      o.w_out.sizes());
  const int64_t value_width = o.w_out.size(1) / heads, rows_v = kv_heads * value_width;
  const int64_t rows = weight_rows(o.w_q), parts = o.w_k ? heads : heads + kv_heads;
  const int64_t width = (o.w_k ? rows : rows - rows_v) / parts;
  const int64_t rows_q = heads * width, rows_k = kv_heads * width, all = rows_q + rows_k + rows_v;
  TORCH_CHECK_VALUE(
      width > 0 && rows == (o.w_k ? rows_q : all),
      "multi_head_attention: the rows of w_q must be those of all heads, got ", rows);
  if (o.w_k)
    check_projection("w_q", o.w_q, heads, width, {o.query.size(2)});
  else
    check_shape("w_q", o.w_q, {all, o.query.size(2)});
  check_projection("w_k", o.w_k, kv_heads, width, {key.size(2)});
  check_projection("w_v", o.w_v, kv_heads, value_width, {value.size(2)});
  TORCH_CHECK_VALUE(
      o.w_k || (key.size(2) == o.query.size(2) && value.size(2) == o.query.size(2)),
      "multi_head_attention: one packed weight needs inputs of one width");
  if (o.b_q && o.b_q->numel() == all)
    check_shape("b_q", o.b_q, {all});
  else
    check_projection("b_q", o.b_q, heads, width, {});
  check_projection("b_k", o.b_k, kv_heads, width, {});
  check_projection("b_v", o.b_v, kv_heads, value_width, {});
  check_shape("b_out", o.b_out, {o.w_out.size(0)});
  check_shape("bias_k", o.bias_k, {rows_k});
  check_shape("bias_v", o.bias_v, {rows_v});
  check_adapter(o.adapters[kAdaptQ], o.query.size(2), rows_q);
  check_adapter(o.adapters[kAdaptK], key.size(2), rows_k);
  check_adapter(o.adapters[kAdaptV], value.size(2), rows_v);
  check_adapter(o.adapters[kAdaptOut], o.w_out.size(1), o.w_out.size(0));
  check_norms_and_rotations(o, width, key.size(1));
  TORCH_CHECK_VALUE(
      options.need_weights >= kNoWeights && options.need_weights <= kWeightsPerHead,
      "multi_head_attention: need_weights must be 0, 1 or 2, got ", options.need_weights);
  check_dropout(options.dropout_p, seed);
  check_softcap(options.softcap);
  check_masks(
      o.attn_mask, o.key_mask, {o.query.size(0), heads, o.query.size(1), key.size(1)},
      o.query.device());
}

}  // namespace fused_remat
