// Philox words in the order of the elements they belong to (see ../philox.h), a vector of counters
// at a time where the instruction set has the 32 x 32 bit products for it.
#pragma once

#include <cstdint>

#include "../philox.h"

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#endif

namespace fused_remat::cpu {
inline namespace CPU_CAPABILITY {
namespace {

// Counters per call: 32 elements.
constexpr int kCounters = 8;

inline void scalar_element_words(uint64_t seed, uint64_t first, uint32_t (&out)[4 * kCounters]) {
  uint32_t words[4][kCounters];
  philox::words<kCounters>(seed, first, words);
  for (int i = 0; i < 4 * kCounters; ++i) out[i] = words[i & 3][i >> 2];
}

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)

// Low and high halves of the products of eight 32-bit numbers with one.
inline void multiply_halves(__m256i a, __m256i by, __m256i& low, __m256i& high) {
  const __m256i even = _mm256_mul_epu32(a, by);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), by);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

// From word-major to element order.
inline void store_interleaved(const __m256i (&w)[4], uint32_t* out) {
  const __m256i low01 = _mm256_unpacklo_epi32(w[0], w[1]),
                high01 = _mm256_unpackhi_epi32(w[0], w[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(w[2], w[3]),
                high23 = _mm256_unpackhi_epi32(w[2], w[3]);
  const __m256i c04 = _mm256_unpacklo_epi64(low01, low23),
                c15 = _mm256_unpackhi_epi64(low01, low23);
  const __m256i c26 = _mm256_unpacklo_epi64(high01, high23),
                c37 = _mm256_unpackhi_epi64(high01, high23);
  auto* to = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(c04, c15, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(c26, c37, 0x20));
  _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(c04, c15, 0x31));
  _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(c26, c37, 0x31));
}

inline void element_words(uint64_t seed, uint64_t first, uint32_t (&out)[4 * kCounters]) {
  const auto low = static_cast<uint32_t>(first);
  if (low > UINT32_MAX - kCounters) return scalar_element_words(seed, first, out);
  __m256i w[4] = {
      _mm256_add_epi32(
          _mm256_set1_epi32(static_cast<int>(low)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
      _mm256_set1_epi32(static_cast<int>(first >> 32)), _mm256_setzero_si256(),
      _mm256_setzero_si256()};
  const __m256i multiplier0 = _mm256_set1_epi64x(philox::kMultiplier0);
  const __m256i multiplier1 = _mm256_set1_epi64x(philox::kMultiplier1);
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < philox::kRounds; ++round) {
    __m256i low0, high0, low1, high1;
    multiply_halves(w[0], multiplier0, low0, high0);
    multiply_halves(w[2], multiplier1, low1, high1);
    w[0] =
        _mm256_xor_si256(_mm256_xor_si256(high1, w[1]), _mm256_set1_epi32(static_cast<int>(key0)));
    w[1] = low1;
    w[2] =
        _mm256_xor_si256(_mm256_xor_si256(high0, w[3]), _mm256_set1_epi32(static_cast<int>(key1)));
    w[3] = low0;
    key0 += philox::kWeyl0;
    key1 += philox::kWeyl1;
  }
  store_interleaved(w, out);
}

#else

inline void element_words(uint64_t seed, uint64_t first, uint32_t (&out)[4 * kCounters]) {
  scalar_element_words(seed, first, out);
}

#endif

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace fused_remat::cpu
