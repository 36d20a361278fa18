// The level-3 ops of attention as they are registered: flat schemas, adapters that group their
// arguments, and calls through the dispatcher, by the backend's suffix.
#pragma once

#include <string>

#include "attention.h"
#include "backends.h"

namespace fused_remat {

// Of level 3, what turns q, k and v into probabilities comes last but for the buffers.
#define FUSED_REMAT_ATTENDING_SCHEMA                                                    \
  "Tensor? attn_mask, Tensor? key_mask, Tensor seed, int band_low, int band_high, int " \
  "extra_keys, float dropout_p, float scale, float softcap, int head0, int num_heads, int scratch"
#define FUSED_REMAT_ATTENDING_PARAMETERS                                                       \
  const OptionalTensor &attn_mask, const OptionalTensor &key_mask, const at::Tensor &seed,     \
      int64_t band_low, int64_t band_high, int64_t extra_keys, double dropout_p, double scale, \
      double softcap, int64_t head0, int64_t num_heads, int64_t scratch
#define FUSED_REMAT_ATTENDING_GROUPED                                                        \
  Attending {                                                                                \
    attn_mask, key_mask, seed, {band_low, band_high}, extra_keys, dropout_p, scale, softcap, \
        head0, num_heads, scratch                                                            \
  }
#define FUSED_REMAT_ATTENDING_FLAT(a)                                                 \
  (a).attn_mask, (a).key_mask, (a).seed, (a).band.low, (a).band.high, (a).extra_keys, \
      (a).dropout_p, (a).scale, (a).softcap, (a).head0, (a).num_heads, (a).scratch

template <auto kImplementation>
void attention_fwd_tile(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, FUSED_REMAT_ATTENDING_PARAMETERS,
    const at::Tensor& out, const at::Tensor& lse) {
  kImplementation(q, k, v, FUSED_REMAT_ATTENDING_GROUPED, out, lse);
}

template <auto kImplementation>
void attention_delta_tile(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, FUSED_REMAT_ATTENDING_PARAMETERS,
    const at::Tensor& lse, const at::Tensor& dout, const OptionalTensor& dweights, double factor,
    bool rebuild, const at::Tensor& out, const at::Tensor& delta, const at::Tensor& correction) {
  kImplementation(
      q, k, v, FUSED_REMAT_ATTENDING_GROUPED, lse, dout, {dweights, factor}, rebuild, out, delta,
      correction);
}

template <auto kImplementation>
void attention_bwd_tile(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, FUSED_REMAT_ATTENDING_PARAMETERS,
    const at::Tensor& lse, const at::Tensor& correction, const at::Tensor& delta,
    const at::Tensor& dout, const OptionalTensor& out, const OptionalTensor& dweights,
    double factor, const OptionalTensor& dq, const OptionalTensor& dk, const OptionalTensor& dv,
    const OptionalTensor& dattn_mask, const OptionalTensor& dkey_mask) {
  const auto defined = [](const OptionalTensor& t) { return t.value_or(at::Tensor()); };
  kImplementation(
      q, k, v, FUSED_REMAT_ATTENDING_GROUPED, lse, correction, delta, dout, out, {dweights, factor},
      {defined(dq), defined(dk), defined(dv), defined(dattn_mask), defined(dkey_mask)});
}

template <auto kImplementation>
void attention_weights_tile(
    const at::Tensor& q, const at::Tensor& k, FUSED_REMAT_ATTENDING_PARAMETERS,
    const at::Tensor& lse, double factor, const at::Tensor& weights) {
  kImplementation(q, k, FUSED_REMAT_ATTENDING_GROUPED, lse, factor, weights);
}

namespace calls {

inline void attention_fwd(
    const std::string& backend, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const Attending& a, const at::Tensor& out, const at::Tensor& lse) {
  level3<decltype(attention_fwd_tile<cpu::attention_fwd>)>("attention_fwd", backend)
      .call(q, k, v, FUSED_REMAT_ATTENDING_FLAT(a), out, lse);
}

inline void attention_delta(
    const std::string& backend, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const Attending& a, const at::Tensor& lse, const at::Tensor& dout,
    const WeightsGradient& weights, bool rebuild, const at::Tensor& out, const at::Tensor& delta,
    const at::Tensor& correction) {
  level3<decltype(attention_delta_tile<cpu::attention_delta>)>("attention_delta", backend)
      .call(
          q, k, v, FUSED_REMAT_ATTENDING_FLAT(a), lse, dout, weights.dweights, weights.factor,
          rebuild, out, delta, correction);
}

inline void attention_bwd(
    const std::string& backend, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const Attending& a, const at::Tensor& lse, const at::Tensor& correction,
    const at::Tensor& delta, const at::Tensor& dout, const OptionalTensor& out,
    const WeightsGradient& weights, const AttentionGradients& to) {
  level3<decltype(attention_bwd_tile<cpu::attention_bwd>)>("attention_bwd", backend)
      .call(
          q, k, v, FUSED_REMAT_ATTENDING_FLAT(a), lse, correction, delta, dout, out,
          weights.dweights, weights.factor, or_none(to.dq), or_none(to.dk), or_none(to.dv),
          or_none(to.dattn_mask), or_none(to.dkey_mask));
}

inline void attention_weights(
    const std::string& backend, const at::Tensor& q, const at::Tensor& k, const Attending& a,
    const at::Tensor& lse, double factor, const at::Tensor& weights) {
  level3<decltype(attention_weights_tile<cpu::attention_weights>)>("attention_weights", backend)
      .call(q, k, FUSED_REMAT_ATTENDING_FLAT(a), lse, factor, weights);
}

}  // namespace calls

}  // namespace fused_remat
