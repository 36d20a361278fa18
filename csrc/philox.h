// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), host and
// device.
//
// The dropout mask of a call is a function of its seed and of an element's linear index alone: the
// key is the seed, the counter is index >> 2, the lane is index & 3. Chunking, threads and backends
// cannot change it.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define FUSED_REMAT_PHILOX_FN __host__ __device__ __forceinline__
#else
// Forced: each translation unit compiles this for its own instruction set, so no shared out-of-line
// copy may exist.
#define FUSED_REMAT_PHILOX_FN inline __attribute__((always_inline))
#endif

namespace fused_remat::philox {

constexpr int kRounds = 10;
constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;

// The words of `kCounters` consecutive counters, lane-major (words[lane][i] belongs to counter
// `first + i`), so that the loops over i vectorise.
template <int kCounters>
FUSED_REMAT_PHILOX_FN void words(uint64_t seed, uint64_t first, uint32_t (&out)[4][kCounters]) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int i = 0; i < kCounters; ++i) {
    out[0][i] = static_cast<uint32_t>(first + i);
    out[1][i] = static_cast<uint32_t>((first + i) >> 32);
    out[2][i] = 0;
    out[3][i] = 0;
  }
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kCounters; ++i) {
      const uint64_t product0 = static_cast<uint64_t>(out[0][i]) * kMultiplier0;
      const uint64_t product1 = static_cast<uint64_t>(out[2][i]) * kMultiplier1;
      out[0][i] = static_cast<uint32_t>(product1 >> 32) ^ out[1][i] ^ key0;
      out[1][i] = static_cast<uint32_t>(product1);
      out[2][i] = static_cast<uint32_t>(product0 >> 32) ^ out[3][i] ^ key1;
      out[3][i] = static_cast<uint32_t>(product0);
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

// An element is dropped iff its 32-bit word is below this. p is in [0, 1), so the product fits 33
// bits. Halves round to even, as Python's round does.
inline uint64_t drop_threshold(double p) {
  return static_cast<uint64_t>(std::nearbyint(p * 4294967296.0));
}

}  // namespace fused_remat::philox
