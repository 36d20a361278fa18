// Rows of numbers in vectors of one instruction set: loads and stores of any storage, dropout
// scales. Included, as all of tile_<name>.cpp's headers, once per instruction set, under its own
// CPU_CAPABILITY, which also names the at::vec namespace: no symbol may be shared between them.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "philox_rows.h"
#include "tile.h"

namespace fused_remat::cpu {
inline namespace CPU_CAPABILITY {
namespace {

// Columns handled at a time: a few buffers of this many numbers stay in the first-level cache.
constexpr int64_t kSpan = 256;

template <class T>
using Vec = at::vec::Vectorized<T>;

template <class T>
struct Buffer {
  alignas(64) T data[kSpan];
};

// Row buffers are computed on in whole vectors; the lanes past the end hold stale finite numbers
// and are never stored.
template <class T, class Body>
inline void for_each_vector(int64_t n, const Body& body) {
  for (int64_t i = 0; i < n; i += Vec<T>::size()) body(i);
}

template <class Half>
inline void load_half(const Half* from, float* to, int64_t n) {
  constexpr int64_t kLanes = Vec<Half>::size();
  for (int64_t i = 0; i < n; i += kLanes) {
    const auto [low, high] =
        at::vec::convert_to_float<Half>(Vec<Half>::loadu(from + i, std::min(kLanes, n - i)));
    low.store(to + i);
    high.store(to + i + kLanes / 2);
  }
}

template <class Half>
inline void store_half(const float* from, Half* to, int64_t n) {
  constexpr int64_t kLanes = Vec<Half>::size();
  for (int64_t i = 0; i < n; i += kLanes)
    at::vec::convert_from_float<Half>(
        Vec<float>::loadu(from + i), Vec<float>::loadu(from + i + kLanes / 2))
        .store(to + i, std::min(kLanes, n - i));
}

template <class T>
inline void load(const void* base, Storage storage, int64_t offset, int64_t n, T* to) {
  if constexpr (std::is_same_v<T, float>) {
    if (storage == Storage::kBFloat16)
      return load_half(static_cast<const at::BFloat16*>(base) + offset, to, n);
    if (storage == Storage::kHalf)
      return load_half(static_cast<const at::Half*>(base) + offset, to, n);
  }
  std::memcpy(to, static_cast<const T*>(base) + offset, n * sizeof(T));
}

template <class T>
inline void store(const T* from, void* base, Storage storage, int64_t offset, int64_t n) {
  if constexpr (std::is_same_v<T, float>) {
    if (storage == Storage::kBFloat16)
      return store_half(from, static_cast<at::BFloat16*>(base) + offset, n);
    if (storage == Storage::kHalf)
      return store_half(from, static_cast<at::Half*>(base) + offset, n);
  }
  std::memcpy(static_cast<T*>(base) + offset, from, n * sizeof(T));
}

template <class T>
inline void load(const Matrix& m, Storage storage, int64_t row, int64_t col, int64_t n, T* to) {
  load(m.data, storage, row * m.stride + col, n, to);
}
template <class T>
inline void store(
    const T* from, const Matrix& m, Storage storage, int64_t row, int64_t col, int64_t n) {
  store(from, m.data, storage, row * m.stride + col, n);
}

template <class T>
inline void multiply(T* a, const T* b, int64_t n) {
  for_each_vector<T>(
      n, [&](int64_t i) { (Vec<T>::loadu(a + i) * Vec<T>::loadu(b + i)).store(a + i); });
}
template <class T>
inline void add(T* a, const T* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) a[i] += b[i];
}

// 0 for a dropped element, 1 / (1 - p) for a kept one, of `n` elements from linear index `first`
// on.
template <class T>
inline void dropout_scales(uint64_t seed, double drop_p, uint64_t first, int64_t n, T* to) {
  constexpr int64_t kWords = 4 * kCounters;
  const uint64_t threshold = philox::drop_threshold(drop_p);
  const T scale = static_cast<T>(1.0 / (1.0 - drop_p));
  if (threshold > UINT32_MAX) {  // no word is that large
    std::fill(to, to + n, T(0));
    return;
  }
  const auto limit = static_cast<uint32_t>(threshold);
  alignas(32) uint32_t words[kWords];
  int64_t skip = static_cast<int64_t>(first & 3);
  for (int64_t done = 0; done < n; skip = 0) {
    element_words(seed, (first + static_cast<uint64_t>(done)) >> 2, words);
    const int64_t m = std::min(n - done, kWords - skip);
    if (m == kWords) {
      for (int64_t i = 0; i < kWords; ++i) to[done + i] = words[i] >= limit ? scale : T(0);
    } else {
      for (int64_t i = 0; i < m; ++i) to[done + i] = words[skip + i] >= limit ? scale : T(0);
    }
    done += m;
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace fused_remat::cpu
