// A norm over the features of token rows, folded into an op: applied to pieces of its input, and
// applied again in backward. docs/math.md, section "Norms".
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace fused_remat {

struct Norm {
  std::string kind;  // "layer_norm", "rms_norm", or "" for none
  std::optional<at::Tensor> weight, bias;
  double eps = 0.0;

  explicit operator bool() const { return !kind.empty(); }
};

// Level 3. out <- norm(rows), computed in the accumulation dtype and rounded to `compute`. rows and
// out [n, D].
using NormalizeRows =
    void(const at::Tensor& rows, const Norm&, at::ScalarType compute, const at::Tensor& out);

// Level 3. From the gradient of norm(rows), [n, D] in the accumulation dtype: drows <- that of the
// rows (may be the same tensor), and the sums over rows are added to dweight and dbias where
// defined.
using NormalizeRowsBackward = void(
    const at::Tensor& dnormalized, const at::Tensor& rows, const Norm&, const at::Tensor& drows,
    const at::Tensor& dweight, const at::Tensor& dbias);

namespace aten {
NormalizeRows normalize_rows;
NormalizeRowsBackward normalize_rows_backward;
}  // namespace aten
// Through the dispatcher, by the backend's name.
namespace calls {
void normalize_rows(
    const std::string& backend, const at::Tensor& rows, const Norm&, at::ScalarType compute,
    const at::Tensor& out);
void normalize_rows_backward(
    const std::string& backend, const at::Tensor& dnormalized, const at::Tensor& rows, const Norm&,
    const at::Tensor& drows, const at::Tensor& dweight, const at::Tensor& dbias);
}  // namespace calls

// Bytes of temporaries that either takes per row.
int64_t norm_bytes_per_row(int64_t features, at::ScalarType accumulate);

}  // namespace fused_remat
