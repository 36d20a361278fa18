// Schemas of what happens to rows before they are projected and to heads after it, and which
// function implements it: folded norms, norms of q and k, rotary embedding.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "backends.h"
#include "head_transform.h"
#include "norm.h"

namespace fused_remat {
namespace {

using at::ScalarType;
using at::Tensor;
using std::string;
using OptionalTensor = std::optional<Tensor>;

// The registered signatures are flat; these adapters group their arguments.
void normalize_rows_op(
    const Tensor& rows, string kind, const OptionalTensor& weight, const OptionalTensor& bias,
    double eps, ScalarType compute, const Tensor& out) {
  aten::normalize_rows(rows, {kind, weight, bias, eps}, compute, out);
}

void normalize_rows_bwd_op(
    const Tensor& dnormalized, const Tensor& rows, string kind, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, const OptionalTensor& drows,
    const OptionalTensor& dweight, const OptionalTensor& dbias) {
  aten::normalize_rows_backward(
      dnormalized, rows, {kind, weight, bias, eps}, drows.value_or(Tensor()),
      dweight.value_or(Tensor()), dbias.value_or(Tensor()));
}

void transform_heads_op(
    const Tensor& heads, const OptionalTensor& norm_weight, double eps, const OptionalTensor& cos,
    const OptionalTensor& sin, bool interleaved, int64_t scratch) {
  aten::transform_heads(heads, {norm_weight, eps, cos, sin, interleaved}, scratch);
}

void transform_heads_bwd_op(
    const Tensor& dheads, const OptionalTensor& raw, const OptionalTensor& norm_weight, double eps,
    const OptionalTensor& cos, const OptionalTensor& sin, bool interleaved, int64_t scratch,
    const OptionalTensor& dnorm_weight) {
  aten::transform_heads_backward(
      dheads, raw.value_or(Tensor()), {norm_weight, eps, cos, sin, interleaved}, scratch,
      dnorm_weight.value_or(Tensor()));
}

}  // namespace

namespace calls {

void normalize_rows(
    const string& backend, const Tensor& rows, const Norm& norm, ScalarType compute,
    const Tensor& out) {
  level3<decltype(normalize_rows_op)>("normalize_rows", backend)
      .call(rows, norm.kind, norm.weight, norm.bias, norm.eps, compute, out);
}

void normalize_rows_backward(
    const string& backend, const Tensor& dnormalized, const Tensor& rows, const Norm& norm,
    const Tensor& drows, const Tensor& dweight, const Tensor& dbias) {
  level3<decltype(normalize_rows_bwd_op)>("normalize_rows_bwd", backend)
      .call(
          dnormalized, rows, norm.kind, norm.weight, norm.bias, norm.eps, or_none(drows),
          or_none(dweight), or_none(dbias));
}

void transform_heads(
    const string& backend, const Tensor& heads, const HeadTransform& t, int64_t scratch) {
  level3<decltype(transform_heads_op)>("transform_heads", backend)
      .call(heads, t.norm_weight, t.eps, t.cos, t.sin, t.interleaved, scratch);
}

void transform_heads_backward(
    const string& backend, const Tensor& dheads, const Tensor& raw, const HeadTransform& t,
    int64_t scratch, const Tensor& dnorm_weight) {
  level3<decltype(transform_heads_bwd_op)>("transform_heads_bwd", backend)
      .call(
          dheads, or_none(raw), t.norm_weight, t.eps, t.cos, t.sin, t.interleaved, scratch,
          or_none(dnorm_weight));
}

}  // namespace calls

TORCH_LIBRARY_FRAGMENT(fused_remat, m) {
  for (const string suffix : kBackends) {
    m.def(("normalize_rows_" + suffix +
           "(Tensor rows, str kind, Tensor? weight, Tensor? bias, float eps, ScalarType compute, "
           "Tensor(a!) out) -> ()")
              .c_str());
    m.def(("normalize_rows_bwd_" + suffix +
           "(Tensor dnormalized, Tensor rows, str kind, Tensor? weight, Tensor? bias, float eps, "
           "Tensor(a!)? drows, Tensor(b!)? dweight, Tensor(c!)? dbias) -> ()")
              .c_str());
    m.def(("transform_heads_" + suffix +
           "(Tensor(a!) heads, Tensor? norm_weight, float eps, Tensor? cos, Tensor? sin, bool "
           "interleaved, int scratch) -> ()")
              .c_str());
    m.def(("transform_heads_bwd_" + suffix +
           "(Tensor(a!) dheads, Tensor? raw, Tensor? norm_weight, float eps, Tensor? cos, Tensor? "
           "sin, bool interleaved, int scratch, Tensor(b!)? dnorm_weight) -> ()")
              .c_str());
  }
}

// One composition serves two backends: it is a small share of a pass.
TORCH_LIBRARY_IMPL(fused_remat, CompositeExplicitAutograd, m) {
  for (const string suffix : {"aten", "cpp"}) {
    m.impl(("normalize_rows_" + suffix).c_str(), normalize_rows_op);
    m.impl(("normalize_rows_bwd_" + suffix).c_str(), normalize_rows_bwd_op);
    m.impl(("transform_heads_" + suffix).c_str(), transform_heads_op);
    m.impl(("transform_heads_bwd_" + suffix).c_str(), transform_heads_bwd_op);
  }
}

TORCH_LIBRARY_IMPL(fused_remat, Autograd, m) {
  not_differentiable(
      m, {"normalize_rows", "normalize_rows_bwd", "transform_heads", "transform_heads_bwd"});
}

}  // namespace fused_remat
