// out [N] += sum over the rows of a [rows, N]: blocks of rows to partial sums, those to one row.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "device.h"
#include "sums_kernels.h"

namespace fused_remat::cuda {
namespace {

using at::Tensor;

void column_sums_op(const Tensor& a, const Tensor& out) {
  const at::ScalarType sums = a.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_VALUE(a.dim() == 2, "column_sums: a must be [rows, N]; got ", a.sizes());
  TORCH_CHECK_VALUE(
      out.dim() == 1 && out.size(0) == a.size(1), "column_sums: out must be [", a.size(1),
      "]; got ", out.sizes());
  TORCH_CHECK_TYPE(
      out.scalar_type() == sums, "column_sums: out must be ", sums, " for a of ", a.scalar_type(),
      "; got ", out.scalar_type());
  if (a.numel() == 0) return;
  const OnDevice on(a);
  Tensor from = a;
  while (true) {
    const int64_t rows = from.size(0), columns = from.size(1);
    const int64_t blocks = (rows + kSumRows - 1) / kSumRows;
    const bool last = blocks == 1;
    const Tensor to =
        last ? out.unsqueeze(0) : at::empty({blocks, columns}, a.options().dtype(sums));
    column_sums(
        {from.const_data_ptr(), rows, columns, from.stride(0), from.stride(1),
         to.mutable_data_ptr(), to.stride(0), to.stride(1), /*add=*/last},
        dtype_of(from), on.stream());
    if (last) return;
    from = to;
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(fused_remat, FUSED_REMAT_CUDA_KEY, m) {
  m.impl("column_sums_cuda", column_sums_op);
}

}  // namespace fused_remat::cuda
