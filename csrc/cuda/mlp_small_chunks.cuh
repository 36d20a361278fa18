// The weights of a narrow MLP in shared memory: all of them at once where they fit, else chunk by
// chunk of the hidden features, the next one under way while one is worked on.
#pragma once

#include "mlp_small_tiles.cuh"

namespace fused_remat::cuda::small {

// Of a block that walks over all features; the same on both sides of the launch.
struct ChunkPlan {
  int features;  // of a chunk, a multiple of 16
  int chunks;
  int64_t shared_bytes;

  // Blocks for so many tiles of token rows. Where weights are loaded once and stay, a block takes
  // several.
  int64_t blocks(int64_t tiles) const {
    constexpr int64_t kMostBlocks = 512;
    return chunks == 1 && tiles > kMostBlocks ? kMostBlocks : tiles;
  }
};

constexpr int64_t kBiasBytes = 2 * mlp_small::kMostFeatures * int64_t(sizeof(float));

// Elements of w_up, w_gate and w_down with so many features in shared memory.
constexpr int64_t chunk_elements(int64_t bucket, int64_t features, bool gated) {
  return (gated ? 2 : 1) * features * (bucket + kPad) + bucket * (features + kPad);
}

inline ChunkPlan plan_chunks(int64_t bucket, int64_t hidden_features, bool gated) {
  constexpr int64_t kElement = 2, kAvailable = mlp_small::kSharedBytes - kBiasBytes;
  const int64_t all = round_up(hidden_features, 16);
  if (kElement * chunk_elements(bucket, all, gated) <= kAvailable)
    return {static_cast<int>(all), 1, kBiasBytes + kElement * chunk_elements(bucket, all, gated)};
  int64_t widest = 16;
  while (2 * kElement * chunk_elements(bucket, widest + 16, gated) <= kAvailable) widest += 16;
  const int64_t chunks = ceil_div(all, widest);
  const int64_t features = round_up(ceil_div(all, chunks), 16);
  return {
      static_cast<int>(features), static_cast<int>(chunks),
      kBiasBytes + 2 * kElement * chunk_elements(bucket, features, gated)};
}

template <class T, int kBucket, bool kGated>
class WeightChunks {
 public:
  // A block walks over several chunks once, over a single one as often as it likes.
  __device__ __forceinline__
  WeightChunks(T* shared, const SmallLayer& layer, int features, int chunks)
      : shared_(shared), layer_(layer), features_(features), chunks_(chunks) {
    prefetch(0);
  }

  static constexpr int kStride = kBucket + kPad;
  __device__ __forceinline__ int down_stride() const { return features_ + kPad; }
  __device__ __forceinline__ const T* up() const { return buffer(current_); }
  __device__ __forceinline__ const T* gate() const { return up() + features_ * kStride; }
  __device__ __forceinline__ const T* down() const {
    return up() + (kGated ? 2 : 1) * features_ * kStride;
  }

  // Before and after the work on each chunk, by all threads.
  __device__ __forceinline__ void acquire() {
    if (resident_) return;
    prefetch(current_ ^ 1);
    cp_async_wait<1>();
    __syncthreads();
    resident_ = chunks_ == 1;
  }
  __device__ __forceinline__ void release() {
    if (chunks_ == 1) return;
    __syncthreads();
    current_ ^= 1;
  }

 private:
  __device__ __forceinline__ T* buffer(int which) const {
    return shared_ + which * chunk_elements(kBucket, features_, kGated);
  }
  // An empty group where nothing is left, so that waits count alike.
  __device__ __forceinline__ void prefetch(int which) {
    if (next_ < chunks_) {
      const int64_t feature0 = static_cast<int64_t>(next_) * features_;
      T* to = buffer(which);
      stage(to, layer_.w_up, feature0, 0, features_, kBucket);
      to += features_ * kStride;
      if constexpr (kGated) {
        stage(to, layer_.w_gate, feature0, 0, features_, kBucket);
        to += features_ * kStride;
      }
      stage(to, layer_.w_down, 0, feature0, kBucket, features_);
      ++next_;
    }
    cp_async_commit();
  }

  T* shared_;
  const SmallLayer& layer_;
  const int features_, chunks_;
  int next_ = 0;           // chunk to be loaded
  bool resident_ = false;  // all weights are there, to stay
  int current_ = 0;
};

}  // namespace fused_remat::cuda::small
