// The blocks of the backward kernel that make the gradients of the parameters: a slice of hidden
// features by a range of token rows, kStepRows of them at a time.
//
// Warps w and w + 4 own the same 16 features. Of a step each makes hidden, dup and dgate of half of
// the rows, transposed [features, tokens], as the A operands of the products over tokens; they swap
// these through shared memory, and each sums half of the columns of the weight gradients.
#pragma once

#include "mlp_small_chunks.cuh"
#include "mlp_small_element.cuh"

namespace fused_remat::cuda::small {

constexpr int kSlice = mlp_small::kSliceFeatures;
constexpr int kGroups = kSlice / 16;  // warps that cover a slice
static_assert(2 * kGroups == mlp_small::kWarps && mlp_small::kStepRows == 32);

// Shared memory of such a block.
template <class T, int kBucket, bool kGated>
struct DwShared {
  static constexpr int kStride = kBucket + kPad, kDownStride = kSlice + kPad;
  static constexpr int kOperands = kGated ? 3 : 2;  // hidden, dup, dgate
  static constexpr int kRows = mlp_small::kStepRows * kStride;

  alignas(16) T up[kSlice * kStride];
  alignas(16) T gate[kGated ? kSlice * kStride : 8];
  alignas(16) T down[kBucket * kDownStride];
  alignas(16) T x[2][kRows];
  alignas(16) T dy[2][kRows];
  uint32_t swapped[mlp_small::kWarps][kOperands][4][32];
  float b_up[kSlice], b_gate[kSlice];
  bool last;
};

// What a thread sums.
template <int kBucket, bool kGated>
struct DwSums {
  static constexpr int kFragments = kBucket / 16;  // of 8 columns
  float up[kFragments][4];
  float gate[kGated ? kFragments : 1][4];
  float down[kFragments][4];           // [features, Do], transposed
  float biases[mlp_small::kBiasSums];  // db_up and db_gate of rows lane / 4 and + 8; db_down

  template <class F>
  __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        f(up[n][i]);
        if constexpr (kGated) f(gate[n][i]);
        f(down[n][i]);
      }
#pragma unroll
    for (int i = 0; i < mlp_small::kBiasSums; ++i) f(biases[i]);
  }
};

template <class T, int kBucket, bool kGated>
class DwBlock {
 public:
  using Shared = DwShared<T, kBucket, kGated>;
  static constexpr int kSteps = kBucket / 16, kHalf = kBucket / 2;
  static_assert(sizeof(Shared) <= mlp_small::kSharedBytes);

  __device__ __forceinline__ DwBlock(const SmallBackward& p, int64_t block)
      : p_(p),
        slice_(block % p.slices),
        range_(block / p.slices),
        shared_(*dynamic_shared<Shared>()),
        dropout_(p.options, p.layer.w_up.rows) {}

  __device__ __forceinline__ void run() {
    sums_.each([](float& sum) { sum = 0.0f; });
    stage(shared_.up, p_.layer.w_up, feature0(), 0, kSlice, kBucket);
    if constexpr (kGated) stage(shared_.gate, p_.layer.w_gate, feature0(), 0, kSlice, kBucket);
    stage(shared_.down, p_.layer.w_down, 0, feature0(), kBucket, kSlice);
    stage_bias(shared_.b_up, p_.layer.b_up, feature0(), kSlice);
    if constexpr (kGated) stage_bias(shared_.b_gate, p_.layer.b_gate, feature0(), kSlice);
    const int64_t begin = range_ * p_.rows_per_range;
    const int64_t end =
        begin + p_.rows_per_range < p_.x.rows ? begin + p_.rows_per_range : p_.x.rows;
    stage_rows(0, begin);
    int now = 0;
    for (int64_t row = begin; row < end; row += mlp_small::kStepRows, now ^= 1) {
      cp_async_wait<0>();
      __syncthreads();
      if (row + mlp_small::kStepRows < end) stage_rows(now ^ 1, row + mlp_small::kStepRows);
      make_operands(now, row);
      if (slice_ == 0 && p_.db_down.data != nullptr) add_dy(now);
      __syncthreads();
      add_products(now);
    }
    if (p_.ranges > 1 && !add_other_ranges()) return;
    __syncthreads();
    write();
  }

 private:
  __device__ __forceinline__ int64_t feature0() const { return slice_ * kSlice; }
  __device__ __forceinline__ int group() const { return warp_of() % kGroups; }
  __device__ __forceinline__ int half() const { return warp_of() / kGroups; }

  __device__ __forceinline__ void stage_rows(int which, int64_t row) {
    stage(shared_.x[which], p_.x, row, 0, mlp_small::kStepRows, kBucket);
    stage(shared_.dy[which], p_.dy, row, 0, mlp_small::kStepRows, kBucket);
    cp_async_commit();
  }

  // hidden, dup and dgate of this warp's features and its half of the rows.
  __device__ __forceinline__ void make_operands(int now, int64_t row) {
    const T *x = shared_.x[now] + half() * 16 * Shared::kStride,
            *dy = shared_.dy[now] + half() * 16 * Shared::kStride;
    const int f = group() * 16;
    Pair up, gate, dhidden;
    clear(up);
    clear(gate);
    clear(dhidden);
#pragma unroll
    for (int k = 0; k < kBucket; k += 16) {
      A a;
      uint32_t b[4];
      ldmatrix_x4(b, wide(x + k, Shared::kStride));
      ldmatrix_x4(a, tall(shared_.up + f * Shared::kStride + k, Shared::kStride));
      multiply<T>(up, a, b);
      if constexpr (kGated) {
        ldmatrix_x4(a, tall(shared_.gate + f * Shared::kStride + k, Shared::kStride));
        multiply<T>(gate, a, b);
      }
      ldmatrix_x4(b, wide(dy + k, Shared::kStride));
      ldmatrix_x4_trans(
          a, tall_trans(shared_.down + k * Shared::kDownStride + f, Shared::kDownStride));
      multiply<T>(dhidden, a, b);
    }
    differentiate<T, kGated>(
        up, gate, dhidden, p_.options.activation, dropout_,
        FeaturesInRows{row + half() * 16, feature0() + f}, shared_.b_up + f, shared_.b_gate + f,
        p_.x.rows, p_.layer.w_up.rows);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums_.biases[i / 2] += dhidden[j][i];
        if constexpr (kGated) sums_.biases[2 + i / 2] += gate[j][i];
      }
    hand_over(0, up);
    hand_over(1, dhidden);
    if constexpr (kGated) hand_over(2, gate);
  }

  __device__ __forceinline__ void hand_over(int which, const Pair& values) {
    A a;
    as_operand<T>(a, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) shared_.swapped[warp_of()][which][i][lane_of()] = a[i];
  }
  __device__ __forceinline__ void take_over(A& a, int rows_half, int which) const {
    const int warp = rows_half * kGroups + group();
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = shared_.swapped[warp][which][i][lane_of()];
  }

  // The products over the rows of the step, for this warp's half of the columns.
  __device__ __forceinline__ void add_products(int now) {
    const bool up = p_.dw_up.data != nullptr, gate = kGated && p_.dw_gate.data != nullptr;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int corner = k * 16 * Shared::kStride + half() * kHalf;
      A a;
      if (p_.dw_down.data != nullptr) {
        take_over(a, k, 0);
        add_product(sums_.down, a, shared_.dy[now] + corner);
      }
      if (up) {
        take_over(a, k, 1);
        add_product(sums_.up, a, shared_.x[now] + corner);
      }
      if constexpr (kGated)
        if (gate) {
          take_over(a, k, 2);
          add_product(sums_.gate, a, shared_.x[now] + corner);
        }
    }
  }
  __device__ __forceinline__ void add_product(
      float (&sums)[kSteps][4], const A& a, const T* rows) const {
#pragma unroll
    for (int n = 0; n < kSteps; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, wide_trans(rows + n * 8, Shared::kStride));
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
      mma_m16n8k16<T>(sums[n], a, left);
      mma_m16n8k16<T>(sums[n + 1], a, right);
    }
  }

  // Thread t sums column t % kBucket over every (kThreads / kBucket)-th row.
  __device__ __forceinline__ void add_dy(int now) {
    constexpr int kParts = mlp_small::kThreads / kBucket;
    const T* column = shared_.dy[now] + threadIdx.x % kBucket;
    for (int r = threadIdx.x / kBucket; r < mlp_small::kStepRows; r += kParts)
      sums_.biases[4] += static_cast<float>(column[r * Shared::kStride]);
  }

  // Leaves this range's sums in the workspace; the last block of the slice to arrive adds up all of
  // them, in the order of the ranges. Whether this is that block.
  __device__ __forceinline__ bool add_other_ranges() {
    constexpr int64_t kEach =
        mlp_small::sums_per_thread(kBucket, kGated) * int64_t(mlp_small::kThreads);
    float* mine = p_.partial + (range_ * p_.slices + slice_) * kEach + threadIdx.x;
    sums_.each([&](float& sum) {
      *mine = sum;
      mine += mlp_small::kThreads;
    });
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
      shared_.last = atomicAdd(p_.arrived + slice_, 1u) + 1 == static_cast<uint32_t>(p_.ranges);
    __syncthreads();
    if (!shared_.last) return false;
    __threadfence();
    sums_.each([](float& sum) { sum = 0.0f; });
    for (int64_t range = 0; range < p_.ranges; ++range) {
      // Volatile: other multiprocessors wrote it.
      const volatile float* from = p_.partial + (range * p_.slices + slice_) * kEach + threadIdx.x;
      sums_.each([&](float& sum) {
        sum += *from;
        from += mlp_small::kThreads;
      });
    }
    return true;
  }

  __device__ __forceinline__ void write() {
    const int lane = lane_of();
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t feature = feature0() + group() * 16 + lane / 4 + i / 2 * 8;
        const int64_t column = half() * kHalf + n * 8 + lane % 4 * 2 + i % 2;
        if (p_.dw_up.data != nullptr) store(p_.dw_up, feature, column, sums_.up[n][i]);
        if constexpr (kGated)
          if (p_.dw_gate.data != nullptr) store(p_.dw_gate, feature, column, sums_.gate[n][i]);
        if (p_.dw_down.data != nullptr) store(p_.dw_down, column, feature, sums_.down[n][i]);
      }
    write_biases();
  }

  __device__ __forceinline__ void write_biases() {
    float* parts = reinterpret_cast<float*>(shared_.swapped);
    const int lane = lane_of(), f = group() * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& sum = sums_.biases[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) parts[(half() * 2 + i / 2) * kSlice + f + i % 2 * 8] = sum;
    }
    parts[4 * kSlice + threadIdx.x] = sums_.biases[4];
    __syncthreads();
    const int t = threadIdx.x;
    if (t < kSlice) {
      if (p_.db_up.data != nullptr)
        store(p_.db_up, 0, feature0() + t, parts[t] + parts[2 * kSlice + t]);
      if (kGated && p_.db_gate.data != nullptr)
        store(p_.db_gate, 0, feature0() + t, parts[kSlice + t] + parts[3 * kSlice + t]);
    }
    if (slice_ == 0 && p_.db_down.data != nullptr && t < kBucket) {
      float sum = 0.0f;
      for (int part = t; part < mlp_small::kThreads; part += kBucket)
        sum += parts[4 * kSlice + part];
      store(p_.db_down, 0, t, sum);
    }
  }

  const SmallBackward& p_;
  const int64_t slice_, range_;
  Shared& shared_;
  DropScales dropout_;
  DwSums<kBucket, kGated> sums_;
};

}  // namespace fused_remat::cuda::small
