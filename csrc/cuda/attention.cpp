// Level 3 of attention on a GPU: each call takes the first row of the table of attention_routes.h
// that has nothing against it.
#include <c10/core/ScalarType.h>
#include <torch/library.h>

#include "../attention_calls.h"
#include "attention_library.h"
#include "attention_own.h"
#include "attention_routes.h"
#include "device.h"

namespace fused_remat::cuda {
namespace {

using at::ScalarType;
using at::Tensor;
using std::string;

bool is_torchs(Route route) { return route < Route::kOwn; }

// Of the calls that torch has no kernel for.
Route own_or_aten(const AttentionFacts& f) {
  return why_not(Route::kOwn, f).empty() ? Route::kOwn : Route::kAten;
}

void attention_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& out, const Tensor& lse) {
  const OnDevice on(q);
  const AttentionFacts facts = facts_of(q, k, v, attending);
  const Route route = route_of(facts);
  if (is_torchs(route)) return library_attention_fwd(route, facts, q, k, v, attending, out, lse);
  if (route == Route::kOwn) return own::attention_fwd(q, k, v, attending, out, lse);
  calls::attention_fwd("aten", q, k, v, attending, out, lse);
}

void attention_delta(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& lse, const Tensor& dout, const WeightsGradient& weights, bool rebuild,
    const Tensor& out, const Tensor& delta, const Tensor& correction) {
  const OnDevice on(q);
  if (own_or_aten(facts_of(q, k, v, attending)) == Route::kOwn)
    return own::attention_delta(
        q, k, v, attending, lse, dout, weights, rebuild, out, delta, correction);
  calls::attention_delta(
      "aten", q, k, v, attending, lse, dout, weights, rebuild, out, delta, correction);
}

void attention_bwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& lse, const Tensor& correction, const Tensor& delta, const Tensor& dout,
    const OptionalTensor& out, const WeightsGradient& weights, const AttentionGradients& to) {
  const OnDevice on(q);
  AttentionFacts facts = facts_of(q, k, v, attending);
  facts.backward = true;
  facts.knows_out = out.has_value();
  facts.dweights = weights.dweights.has_value();
  facts.dmasks = to.dattn_mask.defined() || to.dkey_mask.defined();
  const Route route = route_of(facts);
  if (is_torchs(route))
    return library_attention_bwd(route, facts, q, k, v, attending, lse, dout, *out, to);
  if (route == Route::kOwn)
    return own::attention_bwd(q, k, v, attending, lse, correction, delta, dout, out, weights, to);
  calls::attention_bwd("aten", q, k, v, attending, lse, correction, delta, dout, out, weights, to);
}

void attention_weights(
    const Tensor& q, const Tensor& k, const Attending& attending, const Tensor& lse, double factor,
    const Tensor& weights) {
  const OnDevice on(q);
  if (own_or_aten(facts_of(q, k, q, attending)) == Route::kOwn)
    return own::attention_weights(q, k, attending, lse, factor, weights);
  calls::attention_weights("aten", q, k, attending, lse, factor, weights);
}

// One text per row, in order: its name, and after a colon what is against it. The call takes the
// first name that stands alone.
std::vector<string> attention_routes(
    bool backward, ScalarType dtype, at::IntArrayRef sizes, bool masks, int64_t causal,
    int64_t window_left, int64_t window_right, int64_t extra_keys, double dropout_p, double softcap,
    bool aligned, bool knows_out, bool dweights, bool dmasks, int64_t scratch, int64_t arch,
    int64_t multiprocessors, int64_t cudnn) {
  TORCH_CHECK_VALUE(
      sizes.size() == 7, "attention_routes: sizes must be B, H, Hk, Lq, Lk, E and Ev; got ", sizes);
  AttentionFacts f;
  f.backward = backward, f.dtype = dtype;
  f.batch = sizes[0], f.heads = sizes[1], f.kv_heads = sizes[2];
  f.length_q = sizes[3], f.length_k = sizes[4], f.width = sizes[5], f.value_width = sizes[6];
  f.masks = masks, f.extra_keys = extra_keys;
  const int64_t keys = f.length_k - extra_keys;
  f.band =
      simplified(band_of(causal, window_left, window_right, f.length_q, keys), f.length_q, keys);
  f.dropout_p = dropout_p, f.softcap = softcap, f.aligned = aligned;
  f.knows_out = knows_out, f.dweights = dweights, f.dmasks = dmasks;
  f.scratch = scratch;
  f.machine = machine_told(arch, multiprocessors, cudnn);
  std::vector<string> rows;
  for (int row = 0; row < kRoutes; ++row) {
    string text = kRouteNames[row];
    const char* between = ": ";
    for (const string& reason : why_not(static_cast<Route>(row), f)) {
      text += between + reason;
      between = "; ";
    }
    rows.push_back(text);
  }
  return rows;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_remat, m) {
  if (is_defined("fused_remat::attention_routes")) return;
  m.def(
      "attention_routes(bool backward, ScalarType dtype, int[] sizes, bool masks, int causal, int "
      "window_left, int window_right, int extra_keys, float dropout_p, float softcap, bool "
      "aligned, bool knows_out, bool dweights, bool dmasks, int scratch, int arch, int "
      "multiprocessors, int cudnn) -> str[]",
      attention_routes);
}

TORCH_LIBRARY_IMPL(fused_remat, FUSED_REMAT_CUDA_KEY, m) {
  m.impl("attention_fwd_cuda", attention_fwd_tile<attention_fwd>);
  m.impl("attention_delta_cuda", attention_delta_tile<attention_delta>);
  m.impl("attention_bwd_cuda", attention_bwd_tile<attention_bwd>);
  m.impl("attention_weights_cuda", attention_weights_tile<attention_weights>);
}

}  // namespace fused_remat::cuda
