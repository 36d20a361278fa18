#include "sums_kernels.h"
#include "vectors.cuh"

namespace fused_remat::cuda {
namespace {

constexpr int kLanes = 32, kRowThreads = 8;

// Block (kLanes, kRowThreads): each thread adds every kRowThreads-th row of kSize columns, then the
// row threads are added in their order.
template <class T, int kSize>
__global__ void __launch_bounds__(kLanes* kRowThreads)
    column_sums_kernel(ColumnSumsArgs args, int64_t column_tiles) {
  using Sum = Accumulate<T>;
  __shared__ Sum partial[kRowThreads][kLanes * kSize];
  const int64_t sum_row = blockIdx.x / column_tiles;
  const int64_t tile = blockIdx.x % column_tiles * (kLanes * kSize);
  const int64_t column = tile + threadIdx.x * kSize;
  const int64_t first = sum_row * kSumRows;
  const int64_t end = first + kSumRows < args.rows ? first + kSumRows : args.rows;

  Sum sums[kSize] = {};
  if (column < args.columns) {
    const T* from = static_cast<const T*>(args.a) + column * args.column_stride;
    for (int64_t row = first + threadIdx.y; row < end; row += kRowThreads) {
      const Vector<T, kSize> values = load_vector<kSize>(from + row * args.row_stride);
      for (int i = 0; i < kSize; ++i) sums[i] += static_cast<Sum>(values.at[i]);
    }
  }
  for (int i = 0; i < kSize; ++i) partial[threadIdx.y][threadIdx.x * kSize + i] = sums[i];
  __syncthreads();

  const int thread = threadIdx.y * kLanes + threadIdx.x;
  for (int i = thread; i < kLanes * kSize && tile + i < args.columns; i += kLanes * kRowThreads) {
    Sum sum = partial[0][i];
    for (int row = 1; row < kRowThreads; ++row) sum += partial[row][i];
    Sum* to = static_cast<Sum*>(args.out) + sum_row * args.out_row_stride +
              (tile + i) * args.out_column_stride;
    *to = args.add ? *to + sum : sum;
  }
}

template <class T, int kSize>
void launch_column_sums(const ColumnSumsArgs& args, Stream stream) {
  const int64_t column_tiles = (args.columns + kLanes * kSize - 1) / (kLanes * kSize);
  const int64_t blocks = column_tiles * ((args.rows + kSumRows - 1) / kSumRows);
  if (blocks > kMaxBlocks) throw std::runtime_error("column_sums: more than 2^31 blocks");
  launch(
      "column_sums", column_sums_kernel<T, kSize>, dim3(static_cast<unsigned>(blocks)),
      dim3(kLanes, kRowThreads), 0, stream, args, column_tiles);
}

}  // namespace

void column_sums(const ColumnSumsArgs& args, Dtype dtype, Stream stream) {
  with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kSize = kVectorSize<T>;
    const bool vectors = args.column_stride == 1 && args.columns % kSize == 0 &&
                         rows_aligned(args.a, args.row_stride, sizeof(T));
    vectors ? launch_column_sums<T, kSize>(args, stream) : launch_column_sums<T, 1>(args, stream);
  });
}

}  // namespace fused_remat::cuda
