// Host twins of the PTX in csrc/cuda/warp.h, with the layouts that its comments state.
#pragma once

#include "simt.h"

namespace simt {

template <int kMatrices, bool kTransposed>
void load_matrices(
    const char* what, uint32_t (&r)[kMatrices], const void* shared_row, simt::Where where) {
  struct Operand {
    uint32_t* r;
    const void* row;
  } operand{r, shared_row};
  simt::collective(
      what, 0xffffffffu, true, &operand,
      [](void* const(&operands)[32], uint32_t) {
        const auto element = [&](int matrix, int row, int column) {
          const void* from = static_cast<const Operand*>(operands[8 * matrix + row])->row;
          if (reinterpret_cast<uintptr_t>(from) % 16 != 0)
            throw simt::Error("ldmatrix: a row address is not aligned to 16 bytes");
          uint16_t bits;
          std::memcpy(&bits, static_cast<const char*>(from) + 2 * column, sizeof bits);
          return uint32_t{bits};
        };
        for (int lane = 0; lane < 32; ++lane)
          for (int i = 0; i < kMatrices; ++i) {
            const int line = lane / 4, first = lane % 4 * 2;
            static_cast<const Operand*>(operands[lane])->r[i] =
                kTransposed ? element(i, first, line) | element(i, first + 1, line) << 16
                            : element(i, line, first) | element(i, line, first + 1) << 16;
          }
      },
      where);
}

}  // namespace simt

namespace fused_remat::cuda {

template <class T>
void mma_m16n8k16(
    float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
    simt::Where where = simt::Where::current()) {
  static_assert(sizeof(T) == 2);
  struct Operand {
    float* d;
    const uint32_t *a, *b;
  } operand{d, a, b};
  simt::collective(
      "mma_m16n8k16", 0xffffffffu, true, &operand,
      [](void* const(&operands)[32], uint32_t) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; ++lane) {
          const auto* from = static_cast<const Operand*>(operands[lane]);
          const int g = lane / 4, t = lane % 4;
          for (int half = 0; half < 2; ++half) {
            const auto element = [&](uint32_t word) {
              T value;
              const auto bits = static_cast<uint16_t>(word >> 16 * half);
              std::memcpy(&value, &bits, sizeof value);
              return static_cast<float>(value);
            };
            for (int i = 0; i < 4; ++i)
              a[g + 8 * (i % 2)][2 * t + half + 8 * (i / 2)] = element(from->a[i]);
            for (int i = 0; i < 2; ++i) b[2 * t + half + 8 * i][g] = element(from->b[i]);
          }
        }
        for (int lane = 0; lane < 32; ++lane) {
          float* d = static_cast<const Operand*>(operands[lane])->d;
          for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            for (int k = 0; k < 16; ++k) d[i] += a[row][k] * b[k][column];
          }
        }
      },
      where);
}

inline void ldmatrix_x4(
    uint32_t (&r)[4], const void* shared_row, simt::Where where = simt::Where::current()) {
  simt::load_matrices<4, false>("ldmatrix_x4", r, shared_row, where);
}
inline void ldmatrix_x4_trans(
    uint32_t (&r)[4], const void* shared_row, simt::Where where = simt::Where::current()) {
  simt::load_matrices<4, true>("ldmatrix_x4_trans", r, shared_row, where);
}
inline void ldmatrix_x2(
    uint32_t (&r)[2], const void* shared_row, simt::Where where = simt::Where::current()) {
  simt::load_matrices<2, false>("ldmatrix_x2", r, shared_row, where);
}
inline void ldmatrix_x2_trans(
    uint32_t (&r)[2], const void* shared_row, simt::Where where = simt::Where::current()) {
  simt::load_matrices<2, true>("ldmatrix_x2_trans", r, shared_row, where);
}

// A copy lands when it is waited for, no earlier; until then its target is NaN.
inline void cp_async_16(void* shared, const void* global, bool in_bounds = true) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0)
    throw simt::Error("cp_async_16: the shared address is not aligned to 16 bytes");
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0)
    throw simt::Error("cp_async_16: the global address is not aligned to 16 bytes");
  simt::copy_later(shared, global, 16, !in_bounds);
}
inline void cp_async_commit() { simt::commit_copies(); }
template <int kPending>
void cp_async_wait() {
  simt::wait_copies(kPending);
}

}  // namespace fused_remat::cuda
