// Layouts: flash and the memory-efficient kernels take [B, L, H, E], cuDNN takes [B, H, L, E]; all
// give lse in natural log.
#include "attention_library.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>

#include "aten_call.h"

namespace fused_remat::cuda {
namespace {

using at::Tensor;
using c10::IValue;

struct Operands {
  Tensor q, k, v;
};

// [B, H, L, E] <-> [B, L, H, E].
Tensor turned(const Tensor& heads) { return heads.transpose(1, 2); }

bool is_causal(const Band& band) {
  return band.low <= -Band::kUnlimited && band.high < Band::kUnlimited;
}

// The enumeration CustomMaskType of the memory-efficient kernels.
int64_t mask_type(const Band& band) {
  if (!is_causal(band)) return 0;
  return band.high == 0 ? 1 /* from the top left */ : 2 /* from the bottom right */;
}

// A window counts from the diagonal that ends at the last key; a side that is left out has no
// limit.
void add_window(AtenCall& call, const AttentionFacts& f) {
  const int64_t corner = f.length_k - f.length_q;
  const bool causal = is_causal(f.band) && f.band.high == corner;
  call.with("is_causal", causal);
  if (causal) return;
  if (f.band.low > -Band::kUnlimited) call.with("window_size_left", corner - f.band.low);
  if (f.band.high < Band::kUnlimited) call.with("window_size_right", f.band.high - corner);
}

void flash_fwd(
    const AttentionFacts& f, const Operands& o, double scale, const Tensor& out,
    const Tensor& lse) {
  AtenCall call("aten::_flash_attention_forward");
  call.with("query", turned(o.q)).with("key", turned(o.k)).with("value", turned(o.v));
  call.with("cum_seq_q", IValue()).with("cum_seq_k", IValue());
  call.with("max_q", f.length_q).with("max_k", f.length_k);
  call.with("dropout_p", 0.0).with("return_debug_mask", false).with("scale", scale);
  add_window(call, f);
  const auto made = call();
  Tensor(out).copy_(turned(made[0].toTensor()));
  Tensor(lse).copy_(made[1].toTensor());
}

void efficient_fwd(
    const AttentionFacts& f, const Operands& o, double scale, const Tensor& out,
    const Tensor& lse) {
  AtenCall call("aten::_efficient_attention_forward");
  call.with("query", turned(o.q)).with("key", turned(o.k)).with("value", turned(o.v));
  call.with("bias", IValue()).with("cu_seqlens_q", IValue()).with("cu_seqlens_k", IValue());
  call.with("max_seqlen_q", IValue()).with("max_seqlen_k", IValue()).with("dropout_p", 0.0);
  call.with("custom_mask_type", mask_type(f.band)).with("compute_log_sumexp", true);
  const auto made = call.with("scale", scale)();
  Tensor(out).copy_(turned(made[0].toTensor()));
  // Its rows are padded to what its backward reads at a time.
  Tensor(lse).copy_(made[1].toTensor().narrow(2, 0, f.length_q));
}

void cudnn_fwd(
    const AttentionFacts& f, const Operands& o, double scale, const Tensor& out,
    const Tensor& lse) {
  AtenCall call("aten::_scaled_dot_product_cudnn_attention");
  call.with("query", o.q).with("key", o.k).with("value", o.v).with("attn_bias", IValue());
  call.with("compute_log_sumexp", true).with("is_causal", is_causal(f.band));
  const auto made = call.with("scale", scale)();
  Tensor(out).copy_(made[0].toTensor());
  Tensor(lse).copy_(made[1].toTensor().view(lse.sizes()));
}

// What dropout would be replayed from.
Tensor no_seed(const Tensor& like) { return at::empty({0}, like.options().dtype(at::kLong)); }

struct Gradients {
  Tensor dq, dk, dv;  // [B, H, L, E]; undefined where not wanted
};

// Sums begin at zero, and heads that share keys add theirs in turn.
void add_to(const Tensor& sum, const IValue& gradient) {
  if (sum.defined()) Tensor(sum).add_(turned(gradient.toTensor()));
}
void add(const Gradients& sums, const std::vector<IValue>& made) {
  add_to(sums.dq, made[0]);
  add_to(sums.dk, made[1]);
  add_to(sums.dv, made[2]);
}

void flash_bwd(
    const AttentionFacts& f, const Operands& o, double scale, const Tensor& lse, const Tensor& dout,
    const Tensor& out, const Gradients& sums) {
  AtenCall call("aten::_flash_attention_backward");
  call.with("grad_out", turned(dout).contiguous());
  call.with("query", turned(o.q)).with("key", turned(o.k)).with("value", turned(o.v));
  call.with("out", turned(out).contiguous()).with("logsumexp", lse.contiguous());
  call.with("cum_seq_q", Tensor()).with("cum_seq_k", Tensor());  // undefined: not packed
  call.with("max_q", f.length_q).with("max_k", f.length_k).with("dropout_p", 0.0);
  call.with({"rng_state", "philox_seed"}, no_seed(o.q));
  call.with({"unused", "philox_offset"}, no_seed(o.q)).with("scale", scale);
  add_window(call, f);
  add(sums, call());
}

void efficient_bwd(
    const AttentionFacts& f, const Operands& o, double scale, const Tensor& lse, const Tensor& dout,
    const Tensor& out, const Gradients& sums) {
  constexpr int64_t kRows = 32;
  Tensor padded = at::full(
      {lse.size(0), lse.size(1), (f.length_q + kRows - 1) / kRows * kRows},
      std::numeric_limits<double>::infinity(), lse.options());
  padded.narrow(2, 0, f.length_q).copy_(lse);
  AtenCall call("aten::_efficient_attention_backward");
  call.with("grad_out_", turned(dout).contiguous());
  call.with("query", turned(o.q)).with("key", turned(o.k)).with("value", turned(o.v));
  // It takes rows of `out` to lie one after the other.
  call.with("bias", IValue()).with("out", turned(out).contiguous()).with("logsumexp", padded);
  call.with("cu_seqlens_q", IValue()).with("cu_seqlens_k", IValue());
  call.with("max_seqlen_q", f.length_q).with("max_seqlen_k", f.length_k).with("dropout_p", 0.0);
  call.with("philox_seed", no_seed(o.q)).with("philox_offset", no_seed(o.q));
  call.with("custom_mask_type", mask_type(f.band)).with("bias_requires_grad", false);
  // All keys of a head in one block: dq has one order.
  call.with("scale", scale).with("num_splits_key", 1);
  add(sums, call());
}

// body(samples and key-value heads of a piece) over a group.
template <class Body>
void for_each_piece(Route route, const AttentionFacts& f, const Body& body) {
  const Piece piece = piece_of(route, f);
  TORCH_INTERNAL_ASSERT(piece.batch > 0, "attention: ", kRouteNames[static_cast<int>(route)]);
  for (int64_t b = 0; b < f.batch; b += piece.batch)
    for (int64_t h = 0; h < f.kv_heads; h += piece.kv_heads)
      body(b, std::min(piece.batch, f.batch - b), h, std::min(piece.kv_heads, f.kv_heads - h));
}

// The part of a piece: of key-value heads, or of the query heads that belong to them - all of
// those, or with `turn` those that take their turn together.
struct Part {
  int64_t b, samples, h, kv_heads, repeats, turn = -1;

  Tensor keys(const Tensor& t) const {
    return t.defined() ? t.narrow(0, b, samples).narrow(1, h, kv_heads) : t;
  }
  Tensor queries(const Tensor& t) const {
    if (!t.defined()) return t;
    const Tensor own = t.narrow(0, b, samples).narrow(1, h * repeats, kv_heads * repeats);
    return turn < 0 ? own : own.slice(1, turn, std::nullopt, repeats);
  }
  Operands of(const Operands& o) const { return {queries(o.q), keys(o.k), keys(o.v)}; }
};

// The memory-efficient kernels of older versions have as many key-value heads as query heads: query
// heads that share keys take turns.
template <class Body>
void for_each_part(Route route, const AttentionFacts& f, const Body& body) {
  const int64_t repeats = f.heads / f.kv_heads;
  for_each_piece(route, f, [&](int64_t b, int64_t samples, int64_t h, int64_t kv_heads) {
    Part part{b, samples, h, kv_heads, repeats};
    if (route != Route::kEfficient || repeats == 1) return body(part);
    for (part.turn = 0; part.turn < repeats; ++part.turn) body(part);
  });
}

}  // namespace

void library_attention_fwd(
    Route route, const AttentionFacts& f, const Tensor& q, const Tensor& k, const Tensor& v,
    const Attending& attending, const Tensor& out, const Tensor& lse) {
  const auto run = route == Route::kCudnn   ? cudnn_fwd
                   : route == Route::kFlash ? flash_fwd
                                            : efficient_fwd;
  for_each_part(route, f, [&](const Part& part) {
    run(f, part.of({q, k, v}), attending.scale, part.queries(out), part.queries(lse));
  });
}

void library_attention_bwd(
    Route route, const AttentionFacts& f, const Tensor& q, const Tensor& k, const Tensor& v,
    const Attending& attending, const Tensor& lse, const Tensor& dout, const Tensor& out,
    const AttentionGradients& to) {
  TORCH_INTERNAL_ASSERT(route != Route::kCudnn, "attention: cuDNN has no backward here");
  const auto run = route == Route::kFlash ? flash_bwd : efficient_bwd;
  for_each_part(route, f, [&](const Part& part) {
    run(f, part.of({q, k, v}), attending.scale, part.queries(lse), part.queries(dout),
        part.queries(out), {part.queries(to.dq), part.keys(to.dk), part.keys(to.dv)});
  });
}

}  // namespace fused_remat::cuda
