// The attention ops of all levels, with their arguments grouped. Schemas and registration:
// library_attention.cpp. Maths: docs/math.md.
//
// Dims: B batch, H query heads, Hk key-value heads (a divisor of H), Lq and Lk lengths, E head
// width, Ev value width. q [B, H, Lq, E], k [B, Hk, Lk, E], v [B, Hk, Lk, Ev], out [B, H, Lq, Ev],
// lse and delta [B, H, Lq]; lse is the natural log, -inf for a row with nothing to attend to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "large_lse.h"

namespace fused_remat {

using OptionalTensor = std::optional<at::Tensor>;

// Which corner of [Lq, Lk] positions are compared in; none of them is causal by itself.
enum Causal : int64_t { kNotCausal = 0, kTopLeft = 1, kBottomRight = 2 };

// Query i may see key j iff low <= j - i <= high.
struct Band {
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max() / 4;
  int64_t low = -kUnlimited;
  int64_t high = kUnlimited;
};
// `left` and `right` are -1 where the window has no limit on that side.
inline Band band_of(
    int64_t causal, int64_t left, int64_t right, int64_t length_q, int64_t length_k) {
  TORCH_CHECK_VALUE(
      causal >= kNotCausal && causal <= kBottomRight,
      "causal must be 0 (none), 1 (top left) or 2 (bottom right), got ", causal);
  TORCH_CHECK_VALUE(
      left >= -1 && right >= -1, "window sides must be -1 (no limit) or more, got ", left, " and ",
      right);
  const int64_t shift = causal == kBottomRight ? length_k - length_q : 0;
  Band band;
  // A side may be as long as an integer; sums with it must not wrap.
  const int64_t longest = Band::kUnlimited / 2;
  if (left >= 0) band.low = shift - std::min(left, longest);
  if (right >= 0) band.high = shift + std::min(right, longest);
  if (causal != kNotCausal) band.high = std::min(band.high, shift);
  return band;
}

// Everything that turns q, k and v into probabilities: one set for the whole call, or for the heads
// of a group.
struct Attending {
  // 4-D, each dim that of [B, H, Lq, Lk - extra_keys] or 1; bool (true = take part) or floating
  // (added to the scaled scores). key_mask is [B, 1, 1, Lk - extra_keys].
  OptionalTensor attn_mask, key_mask;
  at::Tensor seed;  // int64 [1], or [0] without dropout
  Band band;
  int64_t extra_keys = 0;  // the last ones, which masks and band do not concern
  double dropout_p = 0.0;
  double scale = 1.0;
  // Scaled scores become softcap * tanh(score / softcap) before any mask; 0 = they stay.
  double softcap = 0.0;
  int64_t head0 = 0;      // of the first query head here among
  int64_t num_heads = 0;  // all H of the call, by which dropout masks are numbered
  int64_t scratch = 0;    // bytes that an implementer's tiles may take beside its operands
};

// Gradient of the attention weights, and what one probability counts in a weight: 1, or 1 / H where
// they are averaged over heads. Undefined where there is none.
struct WeightsGradient {
  OptionalTensor dweights;  // [B, 1 or H, Lq, Lk], accumulation dtype
  double factor = 1.0;
};

// What backward fills: each defined and zeroed, or undefined where not wanted. In the accumulation
// dtype (fp64 for fp64, else fp32); dq, dk and dv with dense rows.
struct AttentionGradients {
  at::Tensor dq, dk, dv;
  at::Tensor dattn_mask, dkey_mask;  // shapes of the masks
};

// Level 3: implementers. Tensors of a head group; q, k, v, out and dout share a dtype, and their
// last dim is dense. lse and delta are in the accumulation dtype.
#define FUSED_REMAT_ATTENTION_IMPLEMENTER                                                          \
  void attention_fwd(                                                                              \
      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attending&,             \
      const at::Tensor& out, const at::Tensor& lse);                                               \
  /* delta <- the row sums of dout * out, and of factor * weights * dweights. `out` is read, or */ \
  /* made from the known lse where `rebuild`. correction <- that of lse, for attention_bwd. */     \
  void attention_delta(                                                                            \
      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attending&,             \
      const at::Tensor& lse, const at::Tensor& dout, const WeightsGradient&, bool rebuild,         \
      const at::Tensor& out, const at::Tensor& delta, const at::Tensor& correction);               \
  /* `out` where it is at hand and delta is nothing but its row sums with dout: kernels that */    \
  /* make delta themselves need it, the others ignore it. */                                       \
  void attention_bwd(                                                                              \
      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attending&,             \
      const at::Tensor& lse, const at::Tensor& correction, const at::Tensor& delta,                \
      const at::Tensor& dout, const OptionalTensor& out, const WeightsGradient&,                   \
      const AttentionGradients&);                                                                  \
  /* weights [B, 1 or H, Lq, Lk] += factor * probabilities after dropout. */                       \
  void attention_weights(                                                                          \
      const at::Tensor& q, const at::Tensor& k, const Attending&, const at::Tensor& lse,           \
      double factor, const at::Tensor& weights);

namespace aten {
FUSED_REMAT_ATTENTION_IMPLEMENTER
}
namespace cpu {
FUSED_REMAT_ATTENTION_IMPLEMENTER
}

}  // namespace fused_remat
