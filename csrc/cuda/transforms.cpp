// Norms of token rows and what happens to heads, from tensors to kernels. Contracts: csrc/norm.h,
// csrc/head_transform.h.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <string>

#include "../backends.h"
#include "../mlp.h"
#include "device.h"
#include "transform_kernels.h"

namespace fused_remat::cuda {
namespace {

using at::ScalarType;
using at::Tensor;
using std::string;

Parameter parameter_of(const OptionalTensor& t) {
  if (!t) return {};
  return {t->const_data_ptr(), dtype_of(*t), t->stride(0)};
}

Rows rows_of(const Tensor& t, void* data) { return {data, dtype_of(t), t.stride(0), t.stride(1)}; }
Rows read(const Tensor& t) { return rows_of(t, const_cast<void*>(t.const_data_ptr())); }
Rows written(const Tensor& t) { return rows_of(t, t.mutable_data_ptr()); }

Heads heads_of(const Tensor& t, void* data) {
  return {data, dtype_of(t), t.stride(0), t.stride(1), t.stride(2)};
}

Angles angles_of(const OptionalTensor& t) {
  if (!t) return {};
  const int64_t batch = t->size(0) == 1 ? 0 : t->stride(0);
  return {t->const_data_ptr(), dtype_of(*t), batch, t->stride(1)};
}

RowNorm row_norm(
    const Tensor& rows, const string& kind, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps) {
  const bool layer_norm = kind == "layer_norm";
  TORCH_CHECK_VALUE(
      layer_norm || kind == "rms_norm", "norm must be layer_norm or rms_norm, got ", kind);
  return {layer_norm, parameter_of(weight), layer_norm ? parameter_of(bias) : Parameter(),
          eps,        rows.size(0),         rows.size(1)};
}

// The gradient of a parameter as a sum of partial sums, a row for each block of rows.
class ParameterSum {
 public:
  ParameterSum(const OptionalTensor& to, int64_t blocks, int64_t width, const Tensor& like) {
    if (!to) return;
    to_ = *to;
    partial_ = at::empty({blocks, width}, like.options());
  }

  void* partial() const { return partial_.defined() ? partial_.mutable_data_ptr() : nullptr; }

  void finish() const {
    if (!to_.defined()) return;
    const auto add = level3<ColumnSums>("column_sums", "cuda");
    if (to_.scalar_type() == partial_.scalar_type() && to_.is_contiguous()) {
      add.call(partial_, to_);
      return;
    }
    const Tensor sum = at::zeros({to_.size(0)}, partial_.options());
    add.call(partial_, sum);
    Tensor(to_).add_(sum);
  }

 private:
  Tensor to_, partial_;
};

int64_t blocks_of(int64_t rows, int64_t rows_per_block) {
  return (rows + rows_per_block - 1) / rows_per_block;
}

void normalize_rows_op(
    const Tensor& rows, string kind, const OptionalTensor& weight, const OptionalTensor& bias,
    double eps, ScalarType compute, const Tensor& out) {
  const OnDevice on(rows);
  const RowNorm norm = row_norm(rows, kind, weight, bias, eps);
  normalize_rows(read(rows), norm, dtype_of(compute), written(out), on.stream());
}

void normalize_rows_bwd_op(
    const Tensor& dnormalized, const Tensor& rows, string kind, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, const OptionalTensor& drows,
    const OptionalTensor& dweight, const OptionalTensor& dbias) {
  const OnDevice on(rows);
  const RowNorm norm = row_norm(rows, kind, weight, bias, eps);
  if (rows.numel() == 0 || !(drows || dweight || dbias)) return;
  const ScalarType wide = dnormalized.scalar_type();
  TORCH_CHECK_TYPE(
      wide == at::kFloat || wide == at::kDouble, "dnormalized must be Float or Double, got ", wide);
  const int64_t blocks = blocks_of(norm.rows, kNormSumRows);
  const ParameterSum weight_sum(dweight, blocks, norm.width, dnormalized),
      bias_sum(dbias, blocks, norm.width, dnormalized);
  Tensor statistics;
  if (dweight || dbias) statistics = at::empty({kNormStatistics, norm.rows}, dnormalized.options());
  const RowNormGradients to{
      drows ? written(*drows) : Rows(),
      statistics.defined() ? statistics.mutable_data_ptr() : nullptr, weight_sum.partial(),
      bias_sum.partial()};
  normalize_rows_backward(read(dnormalized), read(rows), norm, to, on.stream());
  weight_sum.finish();
  bias_sum.finish();
}

// What level 2 passes lies so already.
Tensor dense_features(const Tensor& t) {
  return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous();
}

// The arguments of a kernel, and what they point to.
struct HeadsArguments {
  HeadsCall call;
  OptionalTensor norm_weight, cos, sin;
};

// `of` is what the kernel reads: heads, or their gradients where these are all.
HeadsArguments heads_arguments(
    const Tensor& of, const OptionalTensor& norm_weight, double eps, const OptionalTensor& cos,
    const OptionalTensor& sin, bool interleaved) {
  const auto readable = [&](const OptionalTensor& t) -> OptionalTensor {
    if (!t) return std::nullopt;
    const bool alike = cos->scalar_type() == sin->scalar_type();
    const bool taken = alike && takes_angles(dtype_of(of), dtype_of(*t));
    const ScalarType wide = of.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return dense_features(taken ? *t : t->to(wide));
  };
  HeadsArguments a{
      {},
      norm_weight ? OptionalTensor(norm_weight->contiguous()) : std::nullopt,
      readable(cos),
      readable(sin)};
  a.call = {
      of.size(0),
      of.size(1),
      of.size(2),
      of.size(3),
      cos ? cos->size(2) : 0,
      interleaved,
      parameter_of(a.norm_weight),
      eps,
      angles_of(a.cos),
      angles_of(a.sin)};
  return a;
}

void check_width(const Tensor& heads) {
  const int64_t most = widest_head(dtype_of(heads));
  TORCH_CHECK_VALUE(
      heads.size(3) <= most, "head width must be at most ", most, " for norms and rotations of ",
      heads.scalar_type(), " heads on backend cuda, got ", heads.size(3),
      "; use backend triton or aten");
}

void check_gradients(const Tensor& dheads, const OptionalTensor& raw, bool has_norm) {
  TORCH_CHECK_VALUE(raw || !has_norm, "raw must be given where there is a norm_weight");
  const ScalarType dtype = dheads.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble, "dheads must be Float or Double, got ", dtype);
  if (raw) {
    const ScalarType wide = raw->scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    TORCH_CHECK_TYPE(
        dtype == wide, "dheads must be ", wide, " for raw of ", raw->scalar_type(), ", got ",
        dtype);
  }
  check_width(raw ? *raw : dheads);
}

void transform_heads_op(
    const Tensor& heads, const OptionalTensor& norm_weight, double eps, const OptionalTensor& cos,
    const OptionalTensor& sin, bool interleaved, int64_t scratch) {
  const OnDevice on(heads);
  if (heads.numel() == 0 || !(norm_weight || cos)) return;
  check_width(heads);
  const HeadsArguments a = heads_arguments(heads, norm_weight, eps, cos, sin, interleaved);
  const Tensor dense = dense_features(heads);
  transform_heads(heads_of(dense, dense.mutable_data_ptr()), a.call, on.stream());
  if (!dense.is_same(heads)) Tensor(heads).copy_(dense);
}

void transform_heads_bwd_op(
    const Tensor& dheads, const OptionalTensor& raw, const OptionalTensor& norm_weight, double eps,
    const OptionalTensor& cos, const OptionalTensor& sin, bool interleaved, int64_t scratch,
    const OptionalTensor& dnorm_weight) {
  const OnDevice on(dheads);
  if (dheads.numel() == 0 || !(norm_weight || cos)) return;
  check_gradients(dheads, norm_weight ? raw : std::nullopt, norm_weight.has_value());
  const HeadsArguments a =
      heads_arguments(norm_weight ? *raw : dheads, norm_weight, eps, cos, sin, interleaved);
  const HeadsCall& call = a.call;
  const ParameterSum sum(
      norm_weight ? dnorm_weight : std::nullopt,
      blocks_of(call.batches * call.heads * call.length, kHeadSumRows), call.width, dheads);
  const Tensor dense = dense_features(dheads),
               source = norm_weight ? dense_features(*raw) : Tensor();
  const Heads given =
      norm_weight ? heads_of(source, const_cast<void*>(source.const_data_ptr())) : Heads();
  transform_heads_backward(
      heads_of(dense, dense.mutable_data_ptr()), given, call, sum.partial(), on.stream());
  if (!dense.is_same(dheads)) Tensor(dheads).copy_(dense);
  sum.finish();
}

}  // namespace

TORCH_LIBRARY_IMPL(fused_remat, FUSED_REMAT_CUDA_KEY, m) {
  m.impl("normalize_rows_cuda", normalize_rows_op);
  m.impl("normalize_rows_bwd_cuda", normalize_rows_bwd_op);
  m.impl("transform_heads_cuda", transform_heads_op);
  m.impl("transform_heads_bwd_cuda", transform_heads_bwd_op);
}

}  // namespace fused_remat::cuda
