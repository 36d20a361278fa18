// Body of cpu/tile.h for one instruction set (see vector_rows.h).
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../activations.h"
#include "../mlp_element.h"
#include "tile.h"
#include "vector_rows.h"

namespace fused_remat::activations {

template <class Scalar>
struct Math<at::vec::Vectorized<Scalar>> {
  using V = at::vec::Vectorized<Scalar>;
  static inline V exp(V x) { return x.exp(); }
  static inline V erf(V x) { return x.erf(); }
  static inline V tanh(V x) { return x.tanh(); }
  static inline V where_nonpositive(V x, V nonpositive, V otherwise) {
    return V::blendv(otherwise, nonpositive, x <= V(Scalar(0)));
  }
};

}  // namespace fused_remat::activations

namespace fused_remat::cpu {
inline namespace CPU_CAPABILITY {
namespace {

// A residual and what is rebuilt must be the same number, so both are rounded to the compute dtype.
template <class T>
inline void round_to(Storage compute, T* values, int64_t n) {
  if constexpr (std::is_same_v<T, float>) {
    if (compute == Storage::kFloat) return;
    alignas(64) at::BFloat16 rounded[kSpan];  // as wide as Half
    store(values, rounded, compute, 0, n);
    load(rounded, compute, 0, n, values);
  }
}

// Pre-activations of one span: kept columns as they are, the others from the GEMM plus bias.
template <class T>
inline void load_pre(
    const TileArgs& t, const Matrix& product, const Matrix& kept, const void* bias, bool read_kept,
    int64_t row, int64_t col, int64_t n, T* to) {
  const int64_t n_kept = read_kept ? std::clamp<int64_t>(kept.cols - col, 0, n) : 0;
  if (n_kept < n) {
    load(product, t.storage, row, col, n, to);
    if (bias != nullptr) {
      Buffer<T> b;
      load(bias, t.bias_storage, col, n, b.data);
      for_each_vector<T>(
          n, [&](int64_t i) { (Vec<T>::loadu(to + i) + Vec<T>::loadu(b.data + i)).store(to + i); });
    }
    round_to(t.compute, to, n);
  }
  if (n_kept > 0) {
    // By way of a buffer: halves are loaded in whole vectors, which would run into the rebuilt
    // columns.
    Buffer<T> values;
    load(kept, t.compute, row, col, n_kept, values.data);
    std::memcpy(to, values.data, n_kept * sizeof(T));
  }
}

template <class T>
inline void keep(
    const TileArgs& t, const T* from, const Matrix& kept, int64_t row, int64_t col, int64_t n) {
  const int64_t n_kept = std::clamp<int64_t>(kept.cols - col, 0, n);
  if (n_kept > 0) store(from, kept, t.compute, row, col, n_kept);
}

// The same, of a span of the tile's hidden features.
template <class T>
inline void dropout_scales(const TileArgs& t, int64_t row, int64_t col, int64_t n, T* to) {
  const auto first = static_cast<uint64_t>((t.row0 + row) * t.hidden_features + t.feature0 + col);
  dropout_scales(t.seed, t.drop_p, first, n, to);
}

template <class Act, class T>
void forward_block(const TileArgs& t, const Block& block) {
  Buffer<T> up{}, gate{}, scales{};
  const bool gated = t.gate.data != nullptr;
  for (int64_t row = block.row0; row < block.row1; ++row) {
    for (int64_t col = block.col0; col < block.col1; col += kSpan) {
      const int64_t n = std::min(kSpan, block.col1 - col);
      load_pre(t, t.hidden, t.kept_up, t.b_up, /*read_kept=*/false, row, col, n, up.data);
      keep(t, up.data, t.kept_up, row, col, n);
      if (gated) {
        load_pre(t, t.gate, t.kept_gate, t.b_gate, /*read_kept=*/false, row, col, n, gate.data);
        keep(t, gate.data, t.kept_gate, row, col, n);
      }
      for_each_vector<T>(n, [&](int64_t i) {
        mlp_element::forward<Act>(Vec<T>::loadu(up.data + i), Vec<T>::loadu(gate.data + i), gated)
            .store(up.data + i);
      });
      if (t.dropout) {
        dropout_scales(t, row, col, n, scales.data);
        multiply(up.data, scales.data, n);
      }
      store(up.data, t.hidden, t.storage, row, col, n);
    }
  }
}

// Column sums of a block, a few rows at a time: one long chain of additions would lose digits.
template <class T>
class BlockSums {
 public:
  BlockSums(void* sums, const Block& block) : sums_(static_cast<T*>(sums)), block_(block) {}
  void add_span(int64_t col, const T* values, int64_t n) {
    if (sums_ != nullptr) add(group_ + (col - block_.col0), values, n);
  }
  void end_row(int64_t row) {
    const bool full = (row + 1 - block_.row0) % kGroupRows == 0 || row + 1 == block_.row1;
    if (sums_ == nullptr || !full) return;
    add(sums_, group_, block_.col1 - block_.col0);
    std::fill(group_, group_ + kBlockCols, T(0));
  }

 private:
  static constexpr int64_t kGroupRows = 16;
  T* sums_;
  const Block& block_;
  alignas(64) T group_[kBlockCols] = {};
};

// up, dhidden (and gate) -> hidden, dup (and dgate), each over its input's buffer.
template <class Act, class T>
inline void differentiate(T* up, T* gate, T* dhidden, bool gated, int64_t n) {
  for_each_vector<T>(n, [&](int64_t i) {
    const auto made = mlp_element::backward<Act>(
        Vec<T>::loadu(up + i), Vec<T>::loadu(gate + i), Vec<T>::loadu(dhidden + i), gated);
    made.hidden.store(up + i);
    made.dup.store(dhidden + i);
    if (gated) made.dgate.store(gate + i);
  });
}

template <class Act, class T>
void backward_block(const TileArgs& t, const Block& block, void* db_up, void* db_gate) {
  Buffer<T> up{}, gate{}, dhidden{}, scales{};
  BlockSums<T> up_sums(db_up, block), gate_sums(db_gate, block);
  const bool gated = t.gate.data != nullptr, with_gradient = t.dup.data != nullptr;
  for (int64_t row = block.row0; row < block.row1; ++row) {
    for (int64_t col = block.col0; col < block.col1; col += kSpan) {
      const int64_t n = std::min(kSpan, block.col1 - col);
      load_pre(t, t.hidden, t.kept_up, t.b_up, /*read_kept=*/true, row, col, n, up.data);
      if (gated)
        load_pre(t, t.gate, t.kept_gate, t.b_gate, /*read_kept=*/true, row, col, n, gate.data);
      if (with_gradient) load(t.dup, t.storage, row, col, n, dhidden.data);
      if (t.dropout) {
        dropout_scales(t, row, col, n, scales.data);
        multiply(dhidden.data, scales.data, n);
      }
      differentiate<Act>(up.data, gate.data, dhidden.data, gated, n);
      if (t.dropout) multiply(up.data, scales.data, n);
      store(up.data, t.hidden, t.storage, row, col, n);
      if (!with_gradient) continue;
      store(dhidden.data, t.dup, t.storage, row, col, n);
      if (gated) store(gate.data, t.gate, t.storage, row, col, n);
      up_sums.add_span(col, dhidden.data, n);
      gate_sums.add_span(col, gate.data, n);
    }
    up_sums.end_row(row);
    gate_sums.end_row(row);
  }
}

template <class T>
void column_sums_block(const Matrix& a, Storage storage, const Block& block, void* sums) {
  Buffer<T> values;
  BlockSums<T> block_sums(sums, block);
  for (int64_t row = block.row0; row < block.row1; ++row) {
    for (int64_t col = block.col0; col < block.col1; col += kSpan) {
      const int64_t n = std::min(kSpan, block.col1 - col);
      load(a, storage, row, col, n, values.data);
      block_sums.add_span(col, values.data, n);
    }
    block_sums.end_row(row);
  }
}

}  // namespace

inline Kernels make_kernels() {
  using namespace activations;
  return Kernels{
#define FUSED_REMAT_ROW(name, Act) {forward_block<Act, float>, forward_block<Act, double>},
      {FUSED_REMAT_ACTIVATIONS(FUSED_REMAT_ROW)},
#undef FUSED_REMAT_ROW
#define FUSED_REMAT_ROW(name, Act) {backward_block<Act, float>, backward_block<Act, double>},
      {FUSED_REMAT_ACTIVATIONS(FUSED_REMAT_ROW)},
#undef FUSED_REMAT_ROW
      {column_sums_block<float>, column_sums_block<double>}};
}

}  // namespace CPU_CAPABILITY
}  // namespace fused_remat::cpu
