#include "../norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>

namespace fused_remat::aten {

using at::Tensor;

namespace {

// Rows scaled to unit variance (layer norm, after centring) or unit mean square, and by what.
struct Scaled {
  Tensor values;
  Tensor by;  // [n, 1]
};

Scaled scaled(const Tensor& wide, const Norm& norm) {
  const Tensor centred = norm.kind == "layer_norm" ? wide - wide.mean({1}, /*keepdim=*/true) : wide;
  const Tensor by = at::rsqrt(centred.square().mean({1}, /*keepdim=*/true) + norm.eps);
  return {centred * by, by};
}

}  // namespace

void normalize_rows(
    const Tensor& rows, const Norm& norm, at::ScalarType compute, const Tensor& out) {
  const at::ScalarType accumulate = compute == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor wide = rows.to(accumulate);
  const auto cast = [&](const std::optional<Tensor>& t) {
    return t ? std::optional<Tensor>(t->to(accumulate)) : std::nullopt;
  };
  Tensor normalized;
  if (norm.kind == "layer_norm") {
    normalized = at::layer_norm(wide, {rows.size(1)}, cast(norm.weight), cast(norm.bias), norm.eps);
  } else {
    TORCH_CHECK_VALUE(
        norm.kind == "rms_norm", "norm must be layer_norm or rms_norm, got ", norm.kind);
    normalized = scaled(wide, norm).values;
    if (norm.weight) normalized.mul_(norm.weight->to(accumulate));
  }
  out.copy_(normalized.to(compute));
}

void normalize_rows_backward(
    const Tensor& dnormalized, const Tensor& rows, const Norm& norm, const Tensor& drows,
    const Tensor& dweight, const Tensor& dbias) {
  const at::ScalarType accumulate = dnormalized.scalar_type();
  const auto [values, by] = scaled(rows.to(accumulate), norm);
  if (dweight.defined()) Tensor(dweight).add_((dnormalized * values).sum({0}));
  if (dbias.defined()) Tensor(dbias).add_(dnormalized.sum({0}));
  if (!drows.defined()) return;
  Tensor g = norm.weight ? dnormalized * norm.weight->to(accumulate) : dnormalized.clone();
  const Tensor along = (g * values).mean({1}, /*keepdim=*/true);
  if (norm.kind == "layer_norm") g.sub_(g.mean({1}, /*keepdim=*/true));
  Tensor(drows).copy_(g.sub_(values * along).mul_(by));
}

}  // namespace fused_remat::aten

namespace fused_remat {

int64_t norm_bytes_per_row(int64_t features, at::ScalarType accumulate) {
  constexpr int64_t kTemporaries = 4;
  return kTemporaries * features * static_cast<int64_t>(c10::elementSize(accumulate));
}

}  // namespace fused_remat
