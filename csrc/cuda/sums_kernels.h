// Sums over the rows of a matrix, in a fixed order.
#pragma once

#include "platform.h"

namespace fused_remat::cuda {

// Rows that one block adds up.
constexpr int64_t kSumRows = 256;

struct ColumnSumsArgs {
  const void* a;  // [rows, columns]
  int64_t rows, columns;
  int64_t row_stride, column_stride;
  void* out;  // [ceil(rows / kSumRows), columns] of Accumulate<dtype>
  int64_t out_row_stride, out_column_stride;
  bool add;  // to what `out` holds
};

// out[i] = the sums over rows i * kSumRows and on.
void column_sums(const ColumnSumsArgs&, Dtype, Stream);

}  // namespace fused_remat::cuda
