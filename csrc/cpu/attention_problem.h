// One call of the CPU's attention kernels as they see it: raw pointers, tile sizes, and the walk
// over (batch, head, query block, key block).
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "../attention.h"
#include "attention_tile.h"

namespace fused_remat::cpu {

const AttentionKernels& attention_kernels();

// A [B, heads, L, width] tensor with a dense last dim; elements are of `size` bytes.
struct HeadsView {
  char* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_l = 0, width = 0, size = 0;

  HeadsView() = default;
  explicit HeadsView(const at::Tensor& t);
  Matrix rows(int64_t b, int64_t h, int64_t l0) const {
    return {data + (b * stride_b + h * stride_h + l0 * stride_l) * size, stride_l, width};
  }
};

// Row-major numbers of the kernels' own type.
template <class T>
struct Rows {
  T* data;
  int64_t rows, cols, stride;

  at::Tensor tensor() const { return view({rows, cols}, {stride, 1}); }
  at::Tensor transposed() const { return view({cols, rows}, {1, stride}); }

 private:
  at::Tensor view(at::IntArrayRef sizes, at::IntArrayRef strides) const {
    return at::from_blob(data, sizes, strides, at::CppTypeToScalarType<T>::value);
  }
};

inline void multiply(at::Tensor out, const at::Tensor& a, const at::Tensor& b) {
  at::mm_out(out, a, b);
}
inline void multiply_add(at::Tensor out, const at::Tensor& a, const at::Tensor& b) {
  at::addmm_out(out, out, a, b);
}

struct Problem {
  Problem(
      const at::Tensor& q, const at::Tensor& k, int64_t value_width, const Attending& attending);

  Storage storage;  // of q, k, v, out and dout
  bool wide;        // computed in double
  int64_t batch, heads, kv_heads, length_q, length_k, width, value_width;
  HeadsView q, k;
  int64_t tile_queries, tile_keys;

  // Raise where an operand beside q and k does not fit them.
  void check(const at::Tensor& t, bool of_keys, int64_t columns) const;
  void check_rows(const at::Tensor& t) const;

  int64_t kv_head(int64_t h) const { return h / (heads / kv_heads); }
  int64_t query_blocks() const { return (length_q + tile_queries - 1) / tile_queries; }
  int64_t key_blocks() const { return (length_k + tile_keys - 1) / tile_keys; }
  int64_t score_stride() const { return aligned(tile_keys); }

  ScoreTile tile(
      int64_t b, int64_t h, int64_t i0, int64_t rows, int64_t j0, int64_t cols, void* scores) const;

  // body(j0, cols) for the key blocks first..last-1 that the queries [i0, i0 + rows) may see any
  // key of.
  template <class Body>
  void for_visible_keys(
      int64_t i0, int64_t rows, int64_t first, int64_t last, const Body& body) const {
    for (int64_t block = first; block < last; ++block) {
      const int64_t j0 = block * tile_keys, j1 = std::min(length_k, j0 + tile_keys);
      const bool extra = j1 > masked_keys_;
      const bool in_band = std::min(j1, masked_keys_) - 1 >= i0 + band_.low &&
                           j0 <= i0 + rows - 1 + band_.high && j0 < masked_keys_;
      if (extra || in_band) body(j0, j1 - j0);
    }
  }

  // body(task, scratch) for every task, in parallel; scratch is the thread's own.
  template <class T, class Body>
  void for_each_task(int64_t tasks, const Body& body) const;

  static constexpr int64_t kLanes = 64;  // at least the numbers of the widest vector
  // A tile fits the scratch bytes; on a machine of many threads, each with a tile of its own,
  // they may take this many times as much before threads go without.
  static constexpr int64_t kMostScratch = 4;

  // Every buffer of every thread starts on a cache line: a library may round its products
  // differently by how operands lie, and which thread gets which buffers is a matter of luck.
  static int64_t aligned(int64_t numbers) { return (numbers + kLanes - 1) / kLanes * kLanes; }
  int64_t scratch_numbers() const;  // of one thread
  int64_t masked_keys() const { return masked_keys_; }

 private:
  struct MaskStrides {
    MaskView view;
    int64_t stride_b = 0, stride_h = 0;
    int64_t size = 0;
  };
  std::array<MaskStrides, 2> masks_;
  Band band_;
  int64_t masked_keys_;
  bool dropout_;
  double drop_p_, scale_, softcap_;
  uint64_t seed_ = 0;
  int64_t head0_, num_heads_, scratch_bytes_;

  static MaskStrides mask_strides(const OptionalTensor& mask);
  void choose_tiles();
  void check_mask(const OptionalTensor& mask) const;
};

// A thread's buffers, and the operands of a tile as the kernels' own numbers: in place where they
// are stored as such, else converted into a buffer.
template <class T>
class Scratch {
 public:
  Scratch(const Problem& p, T* memory)
      : p_(p),
        stride_(p.score_stride()),
        scores_(memory),
        dscores_(scores_ + p.tile_queries * stride_),
        q_(dscores_ + p.tile_queries * stride_),
        dout_(q_ + p.aligned(p.tile_queries * p.width)),
        out_(dout_ + p.aligned(p.tile_queries * p.value_width)),
        k_(out_ + p.aligned(p.tile_queries * p.value_width)),
        v_(k_ + p.aligned(p.tile_keys * p.width)),
        max_(v_ + p.aligned(p.tile_keys * p.value_width)),
        sum_(max_ + p.aligned(p.tile_queries)) {}

  Rows<T> scores(int64_t rows, int64_t cols) const { return {scores_, rows, cols, stride_}; }
  Rows<T> dscores(int64_t rows, int64_t cols) const { return {dscores_, rows, cols, stride_}; }
  Rows<T> q(int64_t b, int64_t h, int64_t i0, int64_t rows) const {
    return own(p_.q.rows(b, h, i0), rows, q_);
  }
  Rows<T> k(int64_t b, int64_t h, int64_t j0, int64_t rows) const {
    return own(p_.k.rows(b, p_.kv_head(h), j0), rows, k_);
  }
  Rows<T> v(const HeadsView& v, int64_t b, int64_t h, int64_t j0, int64_t rows) const {
    return own(v.rows(b, p_.kv_head(h), j0), rows, v_);
  }
  Rows<T> dout(const HeadsView& dout, int64_t b, int64_t h, int64_t i0, int64_t rows) const {
    return own(dout.rows(b, h, i0), rows, dout_);
  }
  // Zeroed sums that become rows of `out`: there, or in a buffer that `store` writes from.
  Rows<T> out(const Matrix& to, int64_t rows) const {
    const Rows<T> sums = is_own() ? Rows<T>{static_cast<T*>(to.data), rows, to.cols, to.stride}
                                  : Rows<T>{out_, rows, to.cols, to.cols};
    for (int64_t row = 0; row < rows; ++row)
      std::fill_n(sums.data + row * sums.stride, sums.cols, T(0));
    return sums;
  }
  void store(const Rows<T>& sums, const Matrix& to) const {
    if (!is_own())
      attention_kernels().store_rows[p_.wide](sums.data, sums.stride, sums.rows, to, p_.storage);
  }
  T* max() const { return max_; }
  T* sum() const { return sum_; }

 private:
  bool is_own() const { return p_.storage == (p_.wide ? Storage::kDouble : Storage::kFloat); }
  Rows<T> own(const Matrix& from, int64_t rows, T* buffer) const {
    if (is_own()) return {static_cast<T*>(from.data), rows, from.cols, from.stride};
    attention_kernels().load_rows[p_.wide](from, p_.storage, rows, buffer, from.cols);
    return {buffer, rows, from.cols, from.cols};
  }

  const Problem& p_;
  int64_t stride_;
  T *scores_, *dscores_, *q_, *dout_, *out_, *k_, *v_, *max_, *sum_;
};

template <class T, class Body>
void Problem::for_each_task(int64_t tasks, const Body& body) const {
  if (tasks == 0) return;
  const int64_t bytes = scratch_numbers() * static_cast<int64_t>(sizeof(T));
  const int64_t slots = std::clamp<int64_t>(
      kMostScratch * scratch_bytes_ / bytes, 1, std::min<int64_t>(tasks, at::get_num_threads()));
  // Here, not in the threads: what a caller's profiler counts is what this thread allocates.
  const at::Tensor memory =
      at::empty({slots * scratch_numbers()}, at::CppTypeToScalarType<T>::value);
  T* const numbers = memory.mutable_data_ptr<T>();
  std::atomic<int64_t> next_slot{0};
  at::parallel_for(0, tasks, (tasks + slots - 1) / slots, [&](int64_t begin, int64_t end) {
    // Dispatch keys of the calling thread do not follow into the others.
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Scratch<T> scratch(*this, numbers + next_slot++ * scratch_numbers());
    for (int64_t task = begin; task < end; ++task) body(task, scratch);
  });
}

}  // namespace fused_remat::cpu
