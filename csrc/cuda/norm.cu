// LayerNorm and RMSNorm of token rows. A row belongs to a few lanes, a warp or a block, by its
// width; it is walked again for each of its means, out of the cache. The order of every sum depends
// on the width and the number of rows alone.
#include <cmath>

#include "rows.cuh"
#include "transform_kernels.h"

namespace fused_remat::cuda {
namespace {

using namespace rows;

// Threads of a block of narrow rows, and the most of one that is a single row's.
constexpr int kThreads = 256, kMostThreads = 512;
// Pieces of a row that a lane walks before a row gets more lanes.
constexpr int64_t kPiecesPerLane = 4;
// Elements of a row that a thread has in registers at a time.
template <class A>
constexpr int kPiece = sizeof(A) == 8 ? 2 : 8;

struct Shape {
  int64_t rows, width;
  bool layer_norm;
  int lanes;
};

// What a kernel reads or writes, and whether in vectors.
struct Operand {
  Rows at;
  bool aligned;
};
struct ParameterOperand {
  Parameter at;
  bool aligned;
};

template <class T>
__device__ __forceinline__ const T* row_of(const Operand& o, int64_t row) {
  return static_cast<const T*>(o.at.data) + row * o.at.row;
}

template <class T, class A, int N>
__device__ __forceinline__ void load_piece(
    A (&to)[N], const Operand& o, int64_t row, int64_t column, int count) {
  load(to, row_of<T>(o, row) + column * o.at.feature, o.at.feature, count, o.aligned);
}

template <class A, int N>
__device__ __forceinline__ void store_piece(
    const Operand& o, int64_t row, int64_t column, const A (&from)[N], int count) {
  store(
      o.at.data, o.at.dtype, row * o.at.row + column * o.at.feature, from, o.at.feature, count,
      o.aligned);
}

// `otherwise` everywhere where the parameter is absent.
template <class A, int N>
__device__ __forceinline__ void load_parameter(
    A (&to)[N], const ParameterOperand& p, A otherwise, int64_t column, int count) {
  if (p.at.data == nullptr) {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = otherwise;
  } else {
    load(to, p.at.data, p.at.dtype, column * p.at.stride, p.at.stride, count, p.aligned);
  }
}

// body(column, count) for the pieces of a row that are this lane's.
template <int N, class A, class Body>
__device__ __forceinline__ void for_each_piece(
    int64_t width, const Lanes<A>& lanes, const Body& body) {
  for (int64_t column = static_cast<int64_t>(lanes.index) * N; column < width;
       column += static_cast<int64_t>(lanes.count) * N)
    body(column, width - column < N ? static_cast<int>(width - column) : N);
}

template <class A>
struct Scaling {
  A mean;  // 0 for rms_norm
  A by;    // to unit variance, or to a mean square of 1
};

template <class T, class A>
__device__ Scaling<A> scaling(
    const Operand& rows, int64_t row, int64_t width, const Shape& shape, A eps,
    const Lanes<A>& lanes) {
  constexpr int N = kPiece<A>;
  Scaling<A> s{A(0), A(0)};
  if (shape.layer_norm) {
    A total = A(0);
    for_each_piece<N>(width, lanes, [&](int64_t column, int count) {
      A x[N];
      load_piece<T>(x, rows, row, column, count);
#pragma unroll
      for (int j = 0; j < N; ++j) total += x[j];
    });
    s.mean = lanes.sum(total) / static_cast<A>(shape.width);
  }
  A square = A(0);
  for_each_piece<N>(width, lanes, [&](int64_t column, int count) {
    A x[N];
    load_piece<T>(x, rows, row, column, count);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A centred = j < count ? x[j] - s.mean : A(0);
      square += centred * centred;
    }
  });
  s.by = A(1) / std::sqrt(lanes.sum(square) / static_cast<A>(shape.width) + eps);
  return s;
}

template <class A>
__device__ __forceinline__ int64_t row_of_lanes(const Lanes<A>& lanes) {
  return static_cast<int64_t>(blockIdx.x) * lanes.groups() + lanes.group();
}

struct Normalize {
  Shape shape;
  Operand rows, out;
  ParameterOperand weight, bias;
  double eps;
  Dtype compute;
};

template <class T, class A>
__global__ void __launch_bounds__(kMostThreads, 1) normalize_rows_kernel(Normalize p) {
  constexpr int N = kPiece<A>;
  __shared__ A scratch[32];
  const Lanes<A> lanes(p.shape.lanes, scratch);
  const int64_t row = row_of_lanes(lanes);
  // None beyond the last row: whole warps meet in sums.
  const int64_t width = row < p.shape.rows ? p.shape.width : 0;
  const Scaling<A> s = scaling<T>(p.rows, row, width, p.shape, static_cast<A>(p.eps), lanes);
  for_each_piece<N>(width, lanes, [&](int64_t column, int count) {
    A x[N], weight[N], bias[N];
    load_piece<T>(x, p.rows, row, column, count);
    load_parameter(weight, p.weight, A(1), column, count);
    load_parameter(bias, p.bias, A(0), column, count);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = (x[j] - s.mean) * s.by * weight[j] + bias[j];
    if (p.compute != p.out.at.dtype)
      with_type(p.compute, [&](auto type) {
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = widened<A>(narrowed<decltype(type)>(x[j]));
      });
    store_piece(p.out, row, column, x, count);
  });
}

struct Gradients {
  Shape shape;
  Operand d, rows, drows;
  ParameterOperand weight;
  double eps;
  // As in RowNormGradients, by their real dtype's kernels.
  void *statistics, *partial_weight, *partial_bias;
};

// What the gradient of a row needs besides itself; g = dnormalized * weight.
template <class A>
struct RowMeans {
  A g;      // 0 for rms_norm
  A along;  // of g times the normalised row
};

// A product that the compiler does not fuse with what follows: where all g of a row are equal,
// their mean takes all of them away.
template <class A>
__device__ __forceinline__ A rounded_product(A a, A b) {
  return std::fma(a, b, A(0));
}

// Rounded alike wherever it is inlined, so that a row's gradient does not depend on what else is
// wanted.
template <class A>
__device__ __forceinline__ A row_gradient(A d, A weight, A normalized, A by, RowMeans<A> means) {
  return std::fma(-normalized, means.along, rounded_product(d, weight) - means.g) * by;
}

template <class T, class A>
__device__ RowMeans<A> row_means(
    const Gradients& p, int64_t row, int64_t width, Scaling<A> s, const Lanes<A>& lanes) {
  constexpr int N = kPiece<A>;
  A g_total = A(0), along = A(0);
  for_each_piece<N>(width, lanes, [&](int64_t column, int count) {
    A x[N], d[N], weight[N];
    load_piece<T>(x, p.rows, row, column, count);
    load_piece<A>(d, p.d, row, column, count);
    load_parameter(weight, p.weight, A(1), column, count);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A g = rounded_product(d[j], weight[j]);
      g_total += g;
      along += g * ((x[j] - s.mean) * s.by);
    }
  });
  const A width_as = static_cast<A>(p.shape.width);
  const A mean_along = lanes.sum(along) / width_as;
  return {p.shape.layer_norm ? lanes.sum(g_total) / width_as : A(0), mean_along};
}

// The means of each row; and its gradient, where no sum over rows is to read dnormalized as well.
template <class T, class A>
__global__ void __launch_bounds__(kMostThreads, 1) row_gradients_kernel(Gradients p) {
  constexpr int N = kPiece<A>;
  __shared__ A scratch[32];
  const Lanes<A> lanes(p.shape.lanes, scratch);
  A* statistics = static_cast<A*>(p.statistics);
  const int64_t row = row_of_lanes(lanes);
  // None beyond the last row: whole warps meet in sums.
  const int64_t width = row < p.shape.rows ? p.shape.width : 0;
  const Scaling<A> s = scaling<T>(p.rows, row, width, p.shape, static_cast<A>(p.eps), lanes);
  const RowMeans<A> means =
      p.drows.at.data == nullptr ? RowMeans<A>{A(0), A(0)} : row_means<T>(p, row, width, s, lanes);
  if (statistics != nullptr) {
    if (lanes.index == 0 && width > 0) {
      statistics[row] = s.mean;
      statistics[p.shape.rows + row] = s.by;
      statistics[2 * p.shape.rows + row] = means.g;
      statistics[3 * p.shape.rows + row] = means.along;
    }
    return;
  }
  for_each_piece<N>(width, lanes, [&](int64_t column, int count) {
    A x[N], d[N], weight[N];
    load_piece<T>(x, p.rows, row, column, count);
    load_piece<A>(d, p.d, row, column, count);
    load_parameter(weight, p.weight, A(1), column, count);
#pragma unroll
    for (int j = 0; j < N; ++j)
      d[j] = row_gradient(d[j], weight[j], (x[j] - s.mean) * s.by, s.by, means);
    store_piece(p.drows, row, column, d, count);
  });
}

// A block owns kNormSumRows rows of some columns, a thread the same columns of every few rows.
// Writes the gradients of both and what they add to those of weight and bias.
template <class T, class A>
__global__ void __launch_bounds__(kThreads, 2) row_gradient_sums_kernel(Gradients p) {
  constexpr int N = kPiece<A>;
  __shared__ A shared[kThreads * N];
  const Shape& shape = p.shape;
  const int lane = static_cast<int>(threadIdx.x) % shape.lanes,
            group = static_cast<int>(threadIdx.x) / shape.lanes, groups = kThreads / shape.lanes;
  const int64_t columns = static_cast<int64_t>(shape.lanes) * N,
                column_blocks = (shape.width + columns - 1) / columns;
  const A* statistics = static_cast<const A*>(p.statistics);
  const int64_t sum = blockIdx.x / column_blocks, column0 = blockIdx.x % column_blocks * columns,
                column = column0 + static_cast<int64_t>(lane) * N;
  const int64_t left = shape.width - column;
  const int count = left < N ? (left < 0 ? 0 : static_cast<int>(left)) : N;
  const int64_t end = (sum + 1) * kNormSumRows < shape.rows ? (sum + 1) * kNormSumRows : shape.rows;
  A weight[N], dweight[N] = {}, dbias[N] = {};
  load_parameter(weight, p.weight, A(1), column, count);
  for (int64_t row = sum * kNormSumRows + group; count > 0 && row < end; row += groups) {
    const Scaling<A> s{statistics[row], statistics[shape.rows + row]};
    const RowMeans<A> means{statistics[2 * shape.rows + row], statistics[3 * shape.rows + row]};
    A x[N], d[N];
    load_piece<T>(x, p.rows, row, column, count);
    load_piece<A>(d, p.d, row, column, count);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A normalized = (x[j] - s.mean) * s.by;
      dweight[j] += d[j] * normalized;
      dbias[j] += d[j];
      d[j] = row_gradient(d[j], weight[j], normalized, s.by, means);
    }
    if (p.drows.at.data != nullptr) store_piece(p.drows, row, column, d, count);
  }
  const auto add_up = [&](const A(&mine)[N], void* partial) {
    if (partial == nullptr) return;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) shared[threadIdx.x * N + j] = mine[j];
    __syncthreads();
    for (int64_t c = threadIdx.x; c < columns && column0 + c < shape.width; c += kThreads) {
      A total = A(0);
      for (int g = 0; g < groups; ++g) total += shared[g * columns + c];
      static_cast<A*>(partial)[sum * shape.width + column0 + c] = total;
    }
  };
  add_up(dweight, p.partial_weight);
  add_up(dbias, p.partial_bias);
}

// No memory holds the rows of kMaxBlocks.
dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

Operand operand(const Rows& rows, int elements) {
  return {rows, rows.feature == 1 && is_aligned(rows.data, rows.dtype, elements, {rows.row})};
}

ParameterOperand operand(const Parameter& v, int elements) {
  return {v, v.stride == 1 && is_aligned(v.data, v.dtype, elements, {})};
}

struct Launch {
  Shape shape;
  dim3 grid, block;
};

template <class A>
Launch launch_of(const RowNorm& norm) {
  const int64_t pieces = (norm.width + kPiece<A> - 1) / kPiece<A>;
  const int lanes = pieces <= 32 * kPiecesPerLane
                        ? lanes_for(pieces, 32)
                        : lanes_for((pieces + kPiecesPerLane - 1) / kPiecesPerLane, kMostThreads);
  const int threads = lanes <= 32 ? kThreads : lanes;
  const int64_t rows_per_block = threads / lanes;
  const int64_t blocks = (norm.rows + rows_per_block - 1) / rows_per_block;
  return {
      {norm.rows, norm.width, norm.layer_norm, lanes},
      grid_of(blocks),
      dim3(static_cast<unsigned>(threads))};
}

template <class T, class A>
void launch_normalize(
    const Rows& rows, const RowNorm& norm, Dtype compute, const Rows& out, Stream stream) {
  constexpr int N = kPiece<A>;
  const Launch to = launch_of<A>(norm);
  const Normalize p{
      to.shape, operand(rows, N), operand(out, N), operand(norm.weight, N), operand(norm.bias, N),
      norm.eps, compute};
  launch("normalize_rows", normalize_rows_kernel<T, A>, to.grid, to.block, 0, stream, p);
}

template <class T, class A>
void launch_gradients(
    const Rows& dnormalized, const Rows& rows, const RowNorm& norm, const RowNormGradients& to,
    Stream stream) {
  constexpr int N = kPiece<A>;
  const Launch by_row = launch_of<A>(norm);
  Gradients p{by_row.shape,         operand(dnormalized, N), operand(rows, N),
              operand(to.drows, N), operand(norm.weight, N), norm.eps,
              to.statistics,        to.partial_weight,       to.partial_bias};
  launch("row_gradients", row_gradients_kernel<T, A>, by_row.grid, by_row.block, 0, stream, p);
  if (to.statistics == nullptr) return;
  p.shape.lanes = lanes_for((norm.width + N - 1) / N, 32);
  const int64_t columns = static_cast<int64_t>(p.shape.lanes) * N;
  const int64_t blocks =
      (norm.rows + kNormSumRows - 1) / kNormSumRows * ((norm.width + columns - 1) / columns);
  launch(
      "row_gradient_sums", row_gradient_sums_kernel<T, A>, grid_of(blocks), dim3(kThreads), 0,
      stream, p);
}

}  // namespace

void normalize_rows(
    const Rows& rows, const RowNorm& norm, Dtype compute, const Rows& out, Stream stream) {
  if (norm.rows == 0 || norm.width == 0) return;
  with_dtype(rows.dtype, [&](auto type) {
    using T = decltype(type);
    if (compute == Dtype::kDouble)
      launch_normalize<T, double>(rows, norm, compute, out, stream);
    else
      launch_normalize<T, float>(rows, norm, compute, out, stream);
  });
}

void normalize_rows_backward(
    const Rows& dnormalized, const Rows& rows, const RowNorm& norm, const RowNormGradients& to,
    Stream stream) {
  if (norm.rows == 0 || norm.width == 0) return;
  with_dtype(rows.dtype, [&](auto type) {
    using T = decltype(type);
    if (dnormalized.dtype == Dtype::kDouble)
      launch_gradients<T, double>(dnormalized, rows, norm, to, stream);
    else
      launch_gradients<T, float>(dnormalized, rows, norm, to, stream);
  });
}

}  // namespace fused_remat::cuda
