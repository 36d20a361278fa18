// The RMSNorm of heads and their rotation, in place. A row is one head of one position; each of its
// lanes holds one piece of it: pairs that a rotation turns, or features that it leaves. So nothing
// that a lane overwrites is another's, and a lane sums the gradient of the norm's weight for the
// same features over all rows of its block.
#include <cmath>
#include <stdexcept>
#include <type_traits>

#include "rows.cuh"
#include "transform_kernels.h"

namespace fused_remat::cuda {
namespace {

using namespace rows;

constexpr int kThreads = 256;

// A piece is two vectors of this many features: 16 bytes of what is stored.
template <class T>
constexpr int kHalfPiece = 16 / sizeof(T);

struct HeadsOperand {
  Heads at;
  bool aligned;
};
struct AnglesOperand {
  Angles at;
  bool aligned;
};

struct Problem {
  HeadsOperand heads;  // or their gradients
  HeadsOperand raw;    // backward: what was transformed
  AnglesOperand cos, sin;
  Parameter weight;
  bool weight_aligned;
  double eps;
  int64_t rows, length;
  int n_heads, width, rotary, lanes;
  bool interleaved;
  void* partial;
};

struct Position {
  int64_t batch, head, length;
};

// Heads of a position are neighbours: they are turned by the same angles, and lie so in memory.
__device__ __forceinline__ Position position_of(const Problem& p, int64_t row) {
  if (p.rows <= 0xffffffffll) {  // then 32 bits divide faster
    const uint32_t heads = static_cast<uint32_t>(p.n_heads),
                   length = static_cast<uint32_t>(p.length), r = static_cast<uint32_t>(row),
                   at = r / heads;
    return {at / length, r % heads, at % length};
  }
  const int64_t at = row / p.n_heads;
  return {at / p.length, row % p.n_heads, at % p.length};
}

// The features of a lane's two vectors; none where a rotation alone leaves them. Pairs are
// (first[j], second[j]) where halves are turned, and neighbours in first, then second, where they
// are interleaved.
struct Piece {
  int start[2], count[2];
  bool is_turned;
};

template <int N>
__device__ __forceinline__ int clipped(int count) {
  return count < 0 ? 0 : count > N ? N : count;
}

template <int N>
__device__ __forceinline__ Piece piece_of(const Problem& p, int lane) {
  const int half = p.rotary / 2, turned = (half + N - 1) / N;
  Piece piece;
  piece.is_turned = lane < turned;
  if (piece.is_turned && !p.interleaved) {
    piece.start[0] = lane * N;
    piece.start[1] = half + lane * N;
    piece.count[0] = piece.count[1] = clipped<N>(half - lane * N);
    return piece;
  }
  const int end = piece.is_turned ? p.rotary : p.width;
  piece.start[0] = piece.is_turned ? lane * 2 * N : p.rotary + (lane - turned) * 2 * N;
  piece.start[1] = piece.start[0] + N;
  const bool is_wanted = piece.is_turned || p.weight.data != nullptr;
  for (int i = 0; i < 2; ++i) piece.count[i] = is_wanted ? clipped<N>(end - piece.start[i]) : 0;
  return piece;
}

template <class T, class A, int N>
__device__ __forceinline__ void load_heads(
    A (&to)[2][N], const HeadsOperand& o, const Position& at, const Piece& piece) {
  const T* row = static_cast<const T*>(o.at.data) + at.batch * o.at.batch + at.head * o.at.head +
                 at.length * o.at.length;
#pragma unroll
  for (int i = 0; i < 2; ++i) load(to[i], row + piece.start[i], 1, piece.count[i], o.aligned);
}

template <class T, class A, int N>
__device__ __forceinline__ void store_heads(
    const HeadsOperand& o, const Position& at, const Piece& piece, const A (&from)[2][N]) {
  T* row = static_cast<T*>(o.at.data) + at.batch * o.at.batch + at.head * o.at.head +
           at.length * o.at.length;
#pragma unroll
  for (int i = 0; i < 2; ++i) store(row + piece.start[i], from[i], 1, piece.count[i], o.aligned);
}

// Those of one of the piece's vectors.
template <class Angle, class A, int N>
__device__ __forceinline__ void load_angles(
    A (&to)[N], const AnglesOperand& o, const Position& at, const Piece& piece, int i) {
  const Angle* row =
      static_cast<const Angle*>(o.at.data) + at.batch * o.at.batch + at.length * o.at.length;
  load(to, row + piece.start[i], 1, piece.count[i], o.aligned);
}

template <class A, int N>
__device__ __forceinline__ void load_weight(
    A (&to)[N], const Problem& p, const Piece& piece, int i) {
  load(to, p.weight.data, p.weight.dtype, piece.start[i], 1, piece.count[i], p.weight_aligned);
}

// (a, b) -> (a cos_a - b sin_a, b cos_b + a sin_b), or back by the transpose of that.
template <class Angle, class A, int N>
__device__ __forceinline__ void turn(
    A (&x)[2][N], const Problem& p, const Position& at, const Piece& piece, bool back) {
  A turned[2][N], angles[N];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    load_angles<Angle>(angles, p.cos, at, piece, i);
#pragma unroll
    for (int j = 0; j < N; ++j) turned[i][j] = x[i][j] * angles[j];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    load_angles<Angle>(angles, p.sin, at, piece, i);
    const auto add = [&](int j, int other_i, int other_j, bool is_first) {
      const A sine = is_first ? -angles[j] : angles[j];
      if (back)
        turned[other_i][other_j] += x[i][j] * sine;
      else
        turned[i][j] += x[other_i][other_j] * sine;
    };
    // Indices of registers are known when this is compiled.
#pragma unroll
    for (int j = 0; j < N; ++j)
      p.interleaved ? add(j, i, j ^ 1, j % 2 == 0) : add(j, 1 - i, j, i == 0);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    x[0][j] = turned[0][j];
    x[1][j] = turned[1][j];
  }
}

// The factor to a mean square of 1.
template <class A, int N>
__device__ __forceinline__ A scaling(const A (&x)[2][N], const Problem& p, const Lanes<A>& lanes) {
  A square = A(0);
#pragma unroll
  for (int j = 0; j < N; ++j) square += x[0][j] * x[0][j] + x[1][j] * x[1][j];
  return A(1) / std::sqrt(lanes.sum(square) / static_cast<A>(p.width) + static_cast<A>(p.eps));
}

template <class T, class Angle>
__global__ void __launch_bounds__(kThreads, 2) transform_heads_kernel(Problem p) {
  using A = Accumulate<T>;
  constexpr int N = kHalfPiece<T>;
  __shared__ A scratch[32];
  const Lanes<A> lanes(p.lanes, scratch);
  Piece piece = piece_of<N>(p, lanes.index);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * lanes.groups() + lanes.group();
  // Lanes beyond the last row go along with empty pieces: whole warps meet in sums.
  if (row >= p.rows) piece.count[0] = piece.count[1] = 0;
  const Position at = position_of(p, row < p.rows ? row : 0);
  A x[2][N];
  load_heads<T>(x, p.heads, at, piece);
  if (p.weight.data != nullptr) {
    const A by = scaling(x, p, lanes);
    // Rounded before it is turned, as separate modules would.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      A weight[N];
      load_weight(weight, p, piece, i);
#pragma unroll
      for (int j = 0; j < N; ++j) x[i][j] = widened<A>(narrowed<T>(x[i][j] * by * weight[j]));
    }
  }
  if (piece.is_turned) turn<Angle>(x, p, at, piece, /*back=*/false);
  store_heads<T>(p.heads, at, piece, x);
}

// Adds what the groups of a block have summed, group by group, into a row of `partial`.
template <class A, int N>
__device__ void write_sums(
    const A (&sums)[2][N], const Piece& piece, const Problem& p, const Lanes<A>& lanes,
    A (*shared)[2][N], int64_t block) {
  __syncthreads();
#pragma unroll
  for (int j = 0; j < N; ++j) {
    shared[threadIdx.x][0][j] = sums[0][j];
    shared[threadIdx.x][1][j] = sums[1][j];
  }
  __syncthreads();
  if (lanes.group() != 0) return;
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < piece.count[i]; ++j) {
      A total = A(0);
      for (int g = 0; g < lanes.groups(); ++g) total += shared[g * lanes.count + lanes.index][i][j];
      static_cast<A*>(p.partial)[block * p.width + piece.start[i] + j] = total;
    }
}

// A rotation alone needs none of a norm's registers.
template <class T, class Angle, bool kNorm>
__global__ void __launch_bounds__(kThreads, 2) transform_heads_bwd_kernel(Problem p) {
  using A = Accumulate<T>;
  constexpr int N = kHalfPiece<T>;
  __shared__ A scratch[32];
  __shared__ A shared[kThreads][2][N];
  const Lanes<A> lanes(p.lanes, scratch);
  const Piece whole = piece_of<N>(p, lanes.index);
  const int64_t block = blockIdx.x, block_end = (block + 1) * kHeadSumRows,
                end = block_end < p.rows ? block_end : p.rows;
  A sums[2][N] = {};
  for (int64_t first = block * kHeadSumRows; first < end; first += lanes.groups()) {
    const int64_t row = first + lanes.group();
    Piece piece = whole;
    if (row >= end) piece.count[0] = piece.count[1] = 0;
    const Position at = position_of(p, row < end ? row : first);
    A d[2][N];
    load_heads<A>(d, p.heads, at, piece);
    if (piece.is_turned) turn<Angle>(d, p, at, piece, /*back=*/true);
    if constexpr (kNorm) {
      A x[2][N];
      load_heads<T>(x, p.raw, at, piece);
      const A by = scaling(x, p, lanes);
      A along = A(0);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        A weight[N];
        load_weight(weight, p, piece, i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          x[i][j] *= by;
          sums[i][j] += d[i][j] * x[i][j];
          d[i][j] *= weight[j];
          along += d[i][j] * x[i][j];
        }
      }
      along = lanes.sum(along) / static_cast<A>(p.width);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        d[0][j] = (d[0][j] - x[0][j] * along) * by;
        d[1][j] = (d[1][j] - x[1][j] * along) * by;
      }
    }
    store_heads<A>(p.heads, at, piece, d);
  }
  if constexpr (kNorm)
    if (p.partial != nullptr) write_sums(sums, whole, p, lanes, shared, block);
}

HeadsOperand operand(const Heads& h, int elements, bool pieces_aligned) {
  return {h, pieces_aligned && is_aligned(h.data, h.dtype, elements, {h.batch, h.head, h.length})};
}

AnglesOperand operand(const Angles& a, int elements, bool pieces_aligned) {
  return {a, pieces_aligned && is_aligned(a.data, a.dtype, elements, {a.batch, a.length})};
}

template <class T>
Problem problem_of(const Heads& heads, const Heads& raw, const HeadsCall& call) {
  constexpr int N = kHalfPiece<T>;
  const int64_t half = call.rotary / 2;
  // Whether every vector of a piece begins at a multiple of its length.
  const bool aligned = call.rotary % N == 0 && (call.interleaved || half % N == 0);
  const int64_t rest = call.norm_weight.data == nullptr ? 0 : call.width - call.rotary;
  const int64_t pieces = (half + N - 1) / N + (rest + 2 * N - 1) / (2 * N);
  Problem p;
  p.heads = operand(heads, N, aligned);
  p.raw = operand(raw, N, aligned);
  p.cos = operand(call.cos, N, aligned);
  p.sin = operand(call.sin, N, aligned);
  p.weight = call.norm_weight;
  p.weight_aligned = aligned && is_aligned(p.weight.data, p.weight.dtype, N, {});
  p.eps = call.eps;
  p.rows = call.batches * call.heads * call.length;
  p.length = call.length;
  p.n_heads = static_cast<int>(call.heads);
  p.width = static_cast<int>(call.width);
  p.rotary = static_cast<int>(call.rotary);
  p.lanes = lanes_for(pieces, kThreads);
  p.interleaved = call.interleaved;
  p.partial = nullptr;
  return p;
}

// No memory holds the rows of kMaxBlocks.
dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

Dtype accumulated(Dtype heads) { return heads == Dtype::kDouble ? Dtype::kDouble : Dtype::kFloat; }

// f(T(), Angle()) for heads and angles of these dtypes; without angles any will do.
template <class F>
void with_types(Dtype heads, const void* has_angles, Dtype angles, const F& f) {
  const Dtype wanted = has_angles == nullptr ? accumulated(heads) : angles;
  with_dtype(heads, [&](auto type) {
    using T = decltype(type);
    using A = Accumulate<T>;
    if (wanted == heads) return f(T(), T());
    if (wanted == accumulated(heads)) return f(T(), A());
    if constexpr (std::is_same_v<T, float>) {
      if (wanted == Dtype::kHalf) return f(T(), c10::Half());
      if (wanted == Dtype::kBFloat16) return f(T(), c10::BFloat16());
    }
    throw std::runtime_error("transform_heads: no kernel for angles of that dtype");
  });
}

int threads_of(const Problem& p) { return p.lanes <= 32 ? kThreads : p.lanes; }

}  // namespace

int64_t widest_head(Dtype dtype) { return kThreads * (16 / bytes_of(dtype)); }

bool takes_angles(Dtype heads, Dtype angles) {
  return angles == heads || angles == accumulated(heads) ||
         (heads == Dtype::kFloat && angles != Dtype::kDouble);
}

void transform_heads(const Heads& heads, const HeadsCall& call, Stream stream) {
  with_types(heads.dtype, call.cos.data, call.cos.dtype, [&](auto type, auto angle) {
    using T = decltype(type);
    const Problem p = problem_of<T>(heads, Heads(), call);
    if (p.rows == 0 || p.width == 0) return;
    const int64_t groups = threads_of(p) / p.lanes;
    launch(
        "transform_heads", transform_heads_kernel<T, decltype(angle)>,
        grid_of((p.rows + groups - 1) / groups), dim3(static_cast<unsigned>(threads_of(p))), 0,
        stream, p);
  });
}

void transform_heads_backward(
    const Heads& dheads, const Heads& raw, const HeadsCall& call, void* partial, Stream stream) {
  const Dtype dtype = raw.data == nullptr ? dheads.dtype : raw.dtype;
  with_types(dtype, call.cos.data, call.cos.dtype, [&](auto type, auto angle) {
    using T = decltype(type);
    Problem p = problem_of<T>(dheads, raw, call);
    p.partial = partial;
    if (p.rows == 0 || p.width == 0) return;
    auto* kernel = transform_heads_bwd_kernel<T, decltype(angle), true>;
    if constexpr (std::is_same_v<T, Accumulate<T>>)  // gradients, as they are all
      if (raw.data == nullptr) kernel = transform_heads_bwd_kernel<T, decltype(angle), false>;
    launch(
        "transform_heads_bwd", kernel, grid_of((p.rows + kHeadSumRows - 1) / kHeadSumRows),
        dim3(static_cast<unsigned>(threads_of(p))), 0, stream, p);
  });
}

}  // namespace fused_remat::cuda
