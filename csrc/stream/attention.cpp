// Attention from q, k and v. Forward is one call of the implementer; backward goes through groups
// of heads where gradients or incoming gradients need a copy, so that the copies stay within the
// workspace.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "../attention_calls.h"
#include "../attention_ops.h"
#include "checks.h"
#include "heads.h"
#include "tiles.h"

namespace fused_remat {

using at::Tensor;

namespace {

Attending attending_of(
    const Tensor& q, const Tensor& k, const OptionalTensor& attn_mask,
    const OptionalTensor& key_mask, const AttentionOptions& options, const Tensor& seed) {
  const at::ScalarType accumulate = accumulation_dtype(options.compute_dtype);
  Attending attending;
  attending.attn_mask = readable_mask(attn_mask, accumulate);
  attending.key_mask = readable_mask(key_mask_view(key_mask), accumulate);
  attending.seed = seed;
  attending.band =
      band_of(options.causal, options.window_left, options.window_right, q.size(2), k.size(2));
  attending.dropout_p = options.dropout_p;
  attending.scale = options.scale;
  attending.softcap = options.softcap;
  attending.num_heads = q.size(1);
  attending.scratch = tile_scratch(options.workspace);
  return attending;
}

class BackwardPass {
 public:
  BackwardPass(
      const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
      const Attending& attending, const AttentionOptions& options, const Tensor& lse,
      at::ArrayRef<bool> wanted)
      : backend_(options.backend),
        accumulate_(accumulation_dtype(options.compute_dtype)),
        wanted_(wanted),
        attending_(attending),
        dout_(dout),
        q_(q),
        k_(k),
        v_(v),
        lse_(lse),
        pack_dout_(
            dout.scalar_type() != q.scalar_type() || !(dout.stride(3) == 1 || dout.size(3) <= 1)),
        in_place_(accumulate_ == q.scalar_type()),
        group_(group_size(options.workspace)),
        workspace_(group_bytes(group_), q.device()) {
    take_buffers();
  }

  void run(const Tensor& out, const Tensor& dlse, std::array<Tensor, 5>& gradients) {
    const Tensor delta = at::empty(lse_.sizes(), lse_.options());
    const Tensor correction = at::empty(lse_.sizes(), lse_.options());
    AttentionGradients masks;
    masks.dattn_mask = mask_gradient_sum(attending_.attn_mask, wanted_[3], accumulate_);
    masks.dkey_mask = mask_gradient_sum(attending_.key_mask, wanted_[4], accumulate_);
    for (int64_t kv0 = 0; kv0 < k_.size(1); kv0 += group_)
      run_group(
          kv0, std::min(group_, k_.size(1) - kv0), out, dlse, delta, correction, masks, gradients);
    if (wanted_[3]) gradients[3] = masks.dattn_mask;
    if (wanted_[4]) gradients[4] = masks.dkey_mask.view({q_.size(0), k_.size(2)});
  }

 private:
  int64_t repeats() const { return q_.size(1) / k_.size(1); }

  int64_t group_bytes(int64_t kv_heads) const {
    const int64_t wide = static_cast<int64_t>(c10::elementSize(accumulate_));
    const int64_t narrow = static_cast<int64_t>(q_.element_size());
    int64_t bytes = 0;
    const auto add = [&](bool needed, const Tensor& like, int64_t heads, int64_t size) {
      const int64_t piece = like.size(0) * heads * like.size(2) * like.size(3) * size;
      if (needed)
        bytes += (piece + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    };
    add(pack_dout_, dout_, kv_heads * repeats(), narrow);
    add(!in_place_ && wanted_[0], q_, kv_heads * repeats(), wide);
    add(!in_place_ && wanted_[1], k_, kv_heads, wide);
    add(!in_place_ && wanted_[2], v_, kv_heads, wide);
    return bytes;
  }

  // Key-value heads at a time: as many as fit, at least one, in groups of equal size.
  int64_t group_size(int64_t workspace) const {
    const int64_t all = k_.size(1), budget = workspace - tile_scratch(workspace);
    int64_t fit = all;
    while (fit > 1 && group_bytes(fit) > budget) --fit;
    return (all + (all + fit - 1) / fit - 1) / ((all + fit - 1) / fit);
  }

  void take_buffers() {
    const auto take = [&](bool needed, const Tensor& like, int64_t heads, at::ScalarType dtype) {
      return needed ? workspace_.take(like.size(0) * heads * like.size(2) * like.size(3), dtype)
                    : Tensor();
    };
    dout_buffer_ = take(pack_dout_, dout_, group_ * repeats(), q_.scalar_type());
    dq_buffer_ = take(!in_place_ && wanted_[0], q_, group_ * repeats(), accumulate_);
    dk_buffer_ = take(!in_place_ && wanted_[1], k_, group_, accumulate_);
    dv_buffer_ = take(!in_place_ && wanted_[2], v_, group_, accumulate_);
  }

  static Tensor in_buffer(const Tensor& buffer, const Tensor& like) {
    return buffer.narrow(0, 0, like.numel()).view(like.sizes());
  }

  void run_group(
      int64_t kv0, int64_t kv_heads, const Tensor& out, const Tensor& dlse, const Tensor& delta,
      const Tensor& correction, const AttentionGradients& masks, std::array<Tensor, 5>& gradients) {
    const int64_t head0 = kv0 * repeats(), heads = kv_heads * repeats();
    const Tensor q = q_.narrow(1, head0, heads), k = k_.narrow(1, kv0, kv_heads);
    const Tensor v = v_.narrow(1, kv0, kv_heads), lse = lse_.narrow(1, head0, heads);
    Tensor dout = dout_.narrow(1, head0, heads);
    if (pack_dout_) dout = in_buffer(dout_buffer_, dout).copy_(dout);
    const Attending group = group_of(attending_, head0, heads);
    Tensor group_delta = delta.narrow(1, head0, heads);
    const Tensor group_correction = correction.narrow(1, head0, heads);
    calls::attention_delta(
        backend_, q, k, v, group, lse, dout, WeightsGradient{}, /*rebuild=*/false,
        out.narrow(1, head0, heads), group_delta, group_correction);
    if (dlse.defined()) group_delta.sub_(dlse.narrow(1, head0, heads));

    AttentionGradients sums = masks;
    if (masks.dattn_mask.defined()) sums.dattn_mask = head_slice(masks.dattn_mask, head0, heads);
    const auto sum = [&](size_t which, const Tensor& buffer, int64_t first, int64_t n) {
      if (!wanted_[which]) return Tensor();
      const Tensor whole = gradients[which].narrow(1, first, n);
      return (in_place_ ? whole : in_buffer(buffer, whole)).zero_();
    };
    sums.dq = sum(0, dq_buffer_, head0, heads);
    sums.dk = sum(1, dk_buffer_, kv0, kv_heads);
    sums.dv = sum(2, dv_buffer_, kv0, kv_heads);
    calls::attention_bwd(
        backend_, q, k, v, group, lse, group_correction, group_delta, dout,
        dlse.defined() ? std::nullopt : OptionalTensor(out.narrow(1, head0, heads)),
        WeightsGradient{}, sums);
    if (in_place_) return;
    if (wanted_[0]) gradients[0].narrow(1, head0, heads).copy_(sums.dq);
    if (wanted_[1]) gradients[1].narrow(1, kv0, kv_heads).copy_(sums.dk);
    if (wanted_[2]) gradients[2].narrow(1, kv0, kv_heads).copy_(sums.dv);
  }

  const std::string& backend_;
  const at::ScalarType accumulate_;
  const at::ArrayRef<bool> wanted_;
  const Attending& attending_;
  const Tensor dout_, q_, k_, v_, lse_;
  const bool pack_dout_, in_place_;
  const int64_t group_;
  Workspace workspace_;
  Tensor dout_buffer_, dq_buffer_, dk_buffer_, dv_buffer_;
};

}  // namespace

std::tuple<Tensor, Tensor> attention_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& attn_mask,
    const OptionalTensor& key_mask, const AttentionOptions& options, const Tensor& seed) {
  check_attention(q, k, v, attn_mask, key_mask, options, seed);
  const BelowAutocast guard;
  const at::ScalarType dtype = options.compute_dtype;
  Tensor out = empty_heads(q.size(0), q.size(1), q.size(2), v.size(3), q.options().dtype(dtype));
  Tensor lse =
      at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(accumulation_dtype(dtype)));
  calls::attention_fwd(
      options.backend, dense_heads(q, dtype), dense_heads(k, dtype), dense_heads(v, dtype),
      attending_of(q, k, attn_mask, key_mask, options, seed), out, lse);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_bwd(
    const OptionalTensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
    const Tensor& v, const OptionalTensor& attn_mask, const OptionalTensor& key_mask,
    const AttentionOptions& options, const Tensor& seed, const OptionalTensor& out,
    const OptionalTensor& lse, at::ArrayRef<bool> wanted) {
  check_attention(q, k, v, attn_mask, key_mask, options, seed);
  check_wanted({q, k, v, attn_mask, key_mask}, wanted);
  const int64_t rows[] = {q.size(0), q.size(1), q.size(2)};
  const int64_t outs[] = {q.size(0), q.size(1), q.size(2), v.size(3)};
  for (const OptionalTensor& t : {lse, dlse}) check_shape("lse and its gradient", t, rows);
  for (const OptionalTensor& t : {out, dout}) check_shape("out and its gradient", t, outs);
  const BelowAutocast guard;
  std::array<Tensor, 5> gradients;
  const auto empty_like = [&](size_t which, const Tensor& t) {
    if (!wanted[which])
      gradients[which] = at::empty({0}, t.options());
    else if (t.is_contiguous())
      gradients[which] = at::empty(t.sizes(), t.options());
    else
      gradients[which] = empty_heads(t.size(0), t.size(1), t.size(2), t.size(3), t.options());
  };
  empty_like(0, q);
  empty_like(1, k);
  empty_like(2, v);
  gradients[3] = at::empty({0}, attn_mask.value_or(q).options());
  gradients[4] = at::empty({0}, key_mask.value_or(q).options());
  if (q.size(0) == 0 || q.size(1) == 0 ||
      q.size(2) == 0) {  // no rows: nothing was saved and nothing flows
    for (size_t i = 0; i < 3; ++i) gradients[i].zero_();
    if (wanted[3]) gradients[3] = at::zeros_like(*attn_mask);
    if (wanted[4]) gradients[4] = at::zeros_like(*key_mask);
  } else {
    TORCH_CHECK_VALUE(lse.has_value(), "attention_bwd: lse must be given");
    const at::ScalarType dtype = options.compute_dtype;
    const Tensor kept_out =
        out && out->numel() > 0
            ? *out
            : empty_heads(q.size(0), q.size(1), q.size(2), v.size(3), q.options().dtype(dtype));
    const Tensor incoming =
        dout ? *dout : at::zeros({1, 1, 1, 1}, kept_out.options()).expand_as(kept_out);
    BackwardPass(
        incoming, dense_heads(q, dtype), dense_heads(k, dtype), dense_heads(v, dtype),
        attending_of(q, k, attn_mask, key_mask, options, seed), options, *lse, wanted)
        .run(kept_out, dlse.value_or(Tensor()), gradients);
  }
  return {
      gradients[0], gradients[1], gradients[2],
      wanted[3] ? gradients[3].to(attn_mask->scalar_type()) : gradients[3],
      wanted[4] ? gradients[4].to(key_mask->scalar_type()) : gradients[4]};
}

}  // namespace fused_remat
