#include "attention_own.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "../philox.h"
#include "attention_kernels.h"
#include "device.h"

namespace fused_remat::cuda::own {

using at::Tensor;

namespace {

at::ScalarType accumulate_of(const Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

int64_t widest_head(at::ScalarType dtype) {
  return attention_max_width(dtype == at::kDouble ? Dtype::kDouble : Dtype::kFloat);
}

// Checks ---------------------------------------------------------------------------------------

// `t` is [B, heads, L, width] with a dense last dim.
void check_heads(
    const char* name, const Tensor& t, at::IntArrayRef expected, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      t.dim() == 4 && t.sizes() == expected, "cuda attention: ", name, " must be ", expected,
      ", got ", t.sizes());
  TORCH_CHECK_TYPE(
      t.scalar_type() == dtype, "cuda attention: ", name, " must be ", dtype, ", got ",
      t.scalar_type());
  TORCH_CHECK_VALUE(
      t.size(3) <= 1 || t.stride(3) == 1, "cuda attention: ", name,
      " must have a dense last dim, got strides ", t.strides());
}

void check_rows(const char* name, const Tensor& t, const Tensor& q) {
  TORCH_CHECK_VALUE(
      t.dim() == 3 && t.sizes() == q.sizes().slice(0, 3) && (t.size(2) <= 1 || t.stride(2) == 1),
      "cuda attention: ", name, " must be [B, H, Lq] = ", q.sizes().slice(0, 3),
      " with dense rows, got ", t.sizes(), " with strides ", t.strides());
  TORCH_CHECK_TYPE(
      t.scalar_type() == accumulate_of(q), "cuda attention: ", name, " must be ", accumulate_of(q),
      ", got ", t.scalar_type());
}

// `t` broadcasts to `full`.
void check_broadcast(const char* name, const Tensor& t, at::IntArrayRef full) {
  bool fits = t.dim() == 4;
  for (int64_t dim = 0; fits && dim < 4; ++dim) fits = t.size(dim) == 1 || t.size(dim) == full[dim];
  TORCH_CHECK_VALUE(
      fits, "cuda attention: ", name, " must broadcast to ", full, ", got ", t.sizes());
}

void check_weights(const char* name, const Tensor& t, const Tensor& q, const Tensor& k) {
  TORCH_CHECK_VALUE(
      t.dim() == 4 && t.size(0) == q.size(0) && (t.size(1) == 1 || t.size(1) == q.size(1)) &&
          t.size(2) == q.size(2) && t.size(3) == k.size(2),
      "cuda attention: ", name, " must be [B, 1 or H, Lq, Lk] for q ", q.sizes(), " and k ",
      k.sizes(), ", got ", t.sizes());
  TORCH_CHECK_TYPE(
      t.scalar_type() == accumulate_of(q), "cuda attention: ", name, " must be ", accumulate_of(q),
      ", got ", t.scalar_type());
}

// Views ----------------------------------------------------------------------------------------

template <class Data>
AttentionHeads<Data> heads_of(const Tensor& t, Data* data) {
  const auto vector = static_cast<int64_t>(16 / t.element_size());
  bool vectors = data != nullptr && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (int64_t dim = 0; dim < 3; ++dim)
    vectors = vectors && (t.size(dim) <= 1 || t.stride(dim) % vector == 0);
  return {data, t.stride(0), t.stride(1), t.stride(2), vectors && t.size(3) % vector == 0};
}
AttentionHeads<const void> read_heads(const Tensor& t) { return heads_of(t, t.const_data_ptr()); }
AttentionHeads<void> written_heads(const Tensor& t) {
  if (!t.defined()) return {};
  return heads_of(t, t.mutable_data_ptr());
}

AttentionRows<const void> read_rows(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1)};
}
AttentionRows<void> written_rows(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1)};
}

template <class Data>
AttentionGrid<Data> grid_of(const Tensor& t, Data* data, MaskKind kind = MaskKind::kNone) {
  const auto stride = [&](int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); };
  return {data, stride(0), stride(1), stride(2), stride(3), kind};
}

AttentionGrid<const void> weights_gradient_of(
    const WeightsGradient& weights, const Tensor& q, const Tensor& k) {
  if (!weights.dweights) return {};
  check_weights("dweights", *weights.dweights, q, k);
  return grid_of(*weights.dweights, weights.dweights->const_data_ptr());
}

// The call of a head group; keeps what it had to convert.
struct Call {
  AttentionCall call;
  Dtype dtype;
  OptionalTensor masks[2];

  Call(const Tensor& q, const Tensor& k, int64_t value_width, const Attending& attending)
      : dtype(dtype_of(q)), masks{attending.attn_mask, attending.key_mask} {
    TORCH_CHECK_VALUE(
        q.dim() == 4 && k.dim() == 4 && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
        "cuda attention: q ", q.sizes(), " and k ", k.sizes(), " do not fit together");
    check_heads("q", q, q.sizes(), q.scalar_type());
    check_heads("k", k, {q.size(0), k.size(1), k.size(2), q.size(3)}, q.scalar_type());
    AttentionFacts facts;
    facts.dtype = q.scalar_type();
    facts.width = q.size(3), facts.value_width = value_width;
    facts.length_q = q.size(2), facts.length_k = k.size(2);
    for (const std::string& reason : why_not(facts))
      TORCH_CHECK_NOT_IMPLEMENTED(false, "cuda attention: ", reason);
    call.q = read_heads(q);
    call.k = read_heads(k);
    call.batch = narrow(q.size(0));
    call.heads = narrow(q.size(1));
    call.group = narrow(q.size(1) / k.size(1));
    call.length_q = narrow(q.size(2));
    call.length_k = narrow(k.size(2));
    call.masked_keys = narrow(k.size(2) - attending.extra_keys);
    call.width = narrow(q.size(3));
    call.value_width = narrow(value_width);
    call.low = narrow(std::clamp<int64_t>(attending.band.low, -kFarthest, kFarthest));
    call.high = narrow(std::clamp<int64_t>(attending.band.high, -kFarthest, kFarthest));
    call.scale = attending.scale;
    call.softcap = attending.softcap;
    call.head0 = attending.head0;
    call.num_heads = attending.num_heads;
    TORCH_CHECK_VALUE(
        call.masked_keys >= 0, "cuda attention: ", attending.extra_keys, " extra keys of ",
        k.size(2));
    for (int which = 0; which < 2; ++which) call.masks[which] = read_mask(q, which);
    if (attending.dropout_p > 0.0) drop(q, attending);
  }

  bool empty() const { return call.batch == 0 || call.heads == 0 || call.length_q == 0; }

 private:
  static int narrow(int64_t x) { return static_cast<int>(x); }

  AttentionGrid<const void> read_mask(const Tensor& q, int which) {
    OptionalTensor& mask = masks[which];
    if (!mask) return {};
    check_broadcast(
        which == 0 ? "attn_mask" : "key_mask", *mask,
        {q.size(0), which == 0 ? q.size(1) : 1, which == 0 ? q.size(2) : 1, call.masked_keys});
    const at::ScalarType dtype = mask->scalar_type(), accumulate = accumulate_of(q);
    // A third dtype is rare, and kernels for it would be many.
    if (dtype != at::kBool && dtype != q.scalar_type() && dtype != accumulate)
      mask = mask->to(accumulate);
    const MaskKind kind = dtype == at::kBool                       ? MaskKind::kBool
                          : mask->scalar_type() == q.scalar_type() ? MaskKind::kOperand
                                                                   : MaskKind::kAccumulate;
    return grid_of(*mask, mask->const_data_ptr(), kind);
  }

  void drop(const Tensor& q, const Attending& attending) {
    TORCH_CHECK_VALUE(
        attending.seed.numel() == 1 && attending.seed.scalar_type() == at::kLong &&
            attending.seed.device() == q.device(),
        "cuda attention: dropout takes a seed of one int64 on ", q.device(), ", got ",
        attending.seed.sizes(), " of ", attending.seed.scalar_type(), " on ",
        attending.seed.device());
    call.seed = attending.seed.const_data_ptr<int64_t>();
    call.threshold = philox::drop_threshold(attending.dropout_p);
    call.keep_scale = 1.0 / (1.0 - attending.dropout_p);
  }
};

// With v, whose width the call is made with.
Call call_with_values(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending) {
  TORCH_CHECK_VALUE(v.dim() == 4, "cuda attention: v must be [B, Hk, Lk, Ev], got ", v.sizes());
  Call made(q, k, v.size(3), attending);
  check_heads("v", v, {k.size(0), k.size(1), k.size(2), v.size(3)}, q.scalar_type());
  made.call.v = read_heads(v);
  return made;
}

void check_results(const char* name, const Tensor& t, const Tensor& q, const Tensor& v) {
  check_heads(name, t, {q.size(0), q.size(1), q.size(2), v.size(3)}, q.scalar_type());
}

void launch_masks(
    const AttentionBwdArgs& bwd, const Tensor& dmask, const Tensor& q, Dtype dtype, Stream stream) {
  if (!dmask.defined() || dmask.numel() == 0) return;
  check_broadcast(
      "a mask's gradient", dmask, {q.size(0), q.size(1), q.size(2), bwd.call.masked_keys});
  TORCH_CHECK_TYPE(
      dmask.scalar_type() == accumulate_of(q), "cuda attention: a mask's gradient must be ",
      accumulate_of(q), ", got ", dmask.scalar_type());
  launch_attention_dmask(
      {bwd, grid_of(dmask, dmask.mutable_data_ptr()), static_cast<int>(dmask.size(0)),
       static_cast<int>(dmask.size(1)), dmask.size(2) == 1, dmask.size(3) == 1},
      dtype, stream);
}

}  // namespace

std::vector<std::string> why_not(const AttentionFacts& f) {
  std::vector<std::string> reasons;
  const int64_t widest = std::max(f.width, f.value_width), limit = widest_head(f.dtype);
  if (widest > limit)
    reasons.push_back(
        c10::str(
            "heads of ", f.dtype, " are at most ", limit, " wide, got ", f.width, " and ",
            f.value_width));
  if (std::max(f.length_q, f.length_k) >= kMaxLength)
    reasons.push_back(
        c10::str("lengths stay below ", kMaxLength, ", got ", f.length_q, " and ", f.length_k));
  return reasons;
}

void attention_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& out, const Tensor& lse) {
  const Call made = call_with_values(q, k, v, attending);
  check_results("out", out, q, v);
  check_rows("lse", lse, q);
  if (made.empty()) return;
  const OnDevice on(q);
  launch_attention_fwd({made.call, written_heads(out), written_rows(lse)}, made.dtype, on.stream());
}

void attention_delta(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& lse, const Tensor& dout, const WeightsGradient& weights, bool rebuild,
    const Tensor& out, const Tensor& delta, const Tensor& correction) {
  const Call made = call_with_values(q, k, v, attending);
  check_results("dout", dout, q, v);
  check_results("out", out, q, v);
  check_rows("lse", lse, q);
  check_rows("delta", delta, q);
  check_rows("correction", correction, q);
  const auto dweights = weights_gradient_of(weights, q, k);
  if (made.empty()) return;
  const OnDevice on(q);
  AttentionDeltaArgs args{made.call, read_rows(lse), read_heads(dout)};
  if (rebuild)
    args.rebuilt = written_heads(out);
  else
    args.out = read_heads(out);
  args.dweights = dweights;
  args.factor = weights.factor;
  args.delta = written_rows(delta);
  args.correction = written_rows(correction);
  launch_attention_delta(args, made.dtype, on.stream());
}

void attention_bwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& lse, const Tensor& correction, const Tensor& delta, const Tensor& dout,
    const OptionalTensor&, const WeightsGradient& weights, const AttentionGradients& to) {
  const Call made = call_with_values(q, k, v, attending);
  const at::ScalarType accumulate = accumulate_of(q);
  check_results("dout", dout, q, v);
  check_rows("lse", lse, q);
  check_rows("correction", correction, q);
  check_rows("delta", delta, q);
  if (to.dq.defined()) check_heads("dq", to.dq, q.sizes(), accumulate);
  if (to.dk.defined()) check_heads("dk", to.dk, k.sizes(), accumulate);
  if (to.dv.defined()) check_heads("dv", to.dv, v.sizes(), accumulate);
  const auto dweights = weights_gradient_of(weights, q, k);
  if (made.empty() || k.size(2) == 0) return;
  const OnDevice on(q);
  const AttentionBwdArgs bwd{made.call,        read_rows(lse),   read_rows(correction),
                             read_rows(delta), read_heads(dout), dweights,
                             weights.factor};
  if (to.dk.defined() || to.dv.defined())
    launch_attention_dkdv(
        {bwd, written_heads(to.dk), written_heads(to.dv)}, made.dtype, on.stream());
  if (to.dq.defined()) launch_attention_dq({bwd, written_heads(to.dq)}, made.dtype, on.stream());
  launch_masks(bwd, to.dattn_mask, q, made.dtype, on.stream());
  launch_masks(bwd, to.dkey_mask, q, made.dtype, on.stream());
}

void attention_weights(
    const Tensor& q, const Tensor& k, const Attending& attending, const Tensor& lse, double factor,
    const Tensor& weights) {
  const Call made(q, k, /*value_width=*/0, attending);
  check_rows("lse", lse, q);
  check_weights("weights", weights, q, k);
  if (made.empty() || k.size(2) == 0) return;
  const OnDevice on(q);
  const Tensor correction = at::empty(lse.sizes(), lse.options());
  AttentionDeltaArgs corrections{made.call, read_rows(lse)};
  corrections.correction = written_rows(correction);
  launch_attention_delta(corrections, made.dtype, on.stream());
  launch_attention_weights(
      {made.call, read_rows(lse), read_rows(correction),
       grid_of(weights, weights.mutable_data_ptr()), static_cast<int>(weights.size(1)), factor},
      made.dtype, on.stream());
}

}  // namespace fused_remat::cuda::own
