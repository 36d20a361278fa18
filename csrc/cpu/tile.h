// The elementwise half of a tile on the CPU: bias, rounding, dropout, activation and its gradient,
// bias-gradient sums, in one pass over [rows, features]. Compiled once per instruction set
// (tile_*.cpp) and chosen at run time.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fused_remat::cpu {

enum class Storage : uint8_t { kDouble, kFloat, kBFloat16, kHalf };
// Raises TypeError for a dtype that no kernel takes.
Storage storage_of(c10::ScalarType dtype);

// Row-major, last dim dense; `data` is null where the operand is absent.
struct Matrix {
  void* data = nullptr;
  int64_t stride = 0;  // elements between rows
  int64_t cols = 0;
};

struct TileArgs {
  Storage storage;  // of hidden, gate and dup: the GEMM dtype
  Storage compute;  // of residuals, and what pre-activations round to
  Storage bias_storage;
  Matrix hidden;   // in: x w_up^T (columns that are not kept); out: hidden
  Matrix gate;     // in: x w_gate^T; out, in backward: dgate
  Matrix dup;      // backward in: dhidden; out: dup
  Matrix kept_up;  // leading columns: forward writes them, backward reads them
  Matrix kept_gate;
  const void* b_up;  // [features] or null
  const void* b_gate;
  bool dropout;
  double drop_p;
  uint64_t seed;
  int64_t row0, feature0, hidden_features;
};

// A block of the tile: rows [row0, row1), columns [col0, col1).
struct Block {
  int64_t row0, row1, col0, col1;
};

using ForwardBlock = void (*)(const TileArgs&, const Block&);
// Adds the block's column sums of dup and dgate to `db_up` and `db_gate` (from col0 on, double for
// kDouble, else float; null = not wanted).
using BackwardBlock = void (*)(const TileArgs&, const Block&, void* db_up, void* db_gate);
// Adds the block's column sums of `a` to `sums`, likewise.
using ColumnSumsBlock = void (*)(const Matrix& a, Storage, const Block&, void* sums);

// Widest block.
constexpr int64_t kBlockCols = 512;

constexpr int kActivations = 10;
struct Kernels {
  ForwardBlock forward[kActivations][2];  // [activation][in double]
  BackwardBlock backward[kActivations][2];
  ColumnSumsBlock column_sums[2];
};

// One table per instruction set, in the order of FUSED_REMAT_ACTIVATIONS.
const Kernels& kernels_default();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace fused_remat::cpu
