// Body of cpu/attention_tile.h for one instruction set (see vector_rows.h).
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_tile.h"
#include "vector_rows.h"

namespace fused_remat::cpu {
inline namespace CPU_CAPABILITY {
namespace {

template <class T>
constexpr T kNothing = -std::numeric_limits<T>::infinity();

template <class T>
inline void apply_mask(const MaskView& mask, int64_t i, int64_t j0, int64_t n, T* scores) {
  if (mask.data == nullptr) return;
  const int64_t first = i * mask.stride_q + j0 * mask.stride_k;
  if (mask.is_bool) {
    const auto* seen = static_cast<const bool*>(mask.data) + first;
    for (int64_t j = 0; j < n; ++j) scores[j] = seen[j * mask.stride_k] ? scores[j] : kNothing<T>;
    return;
  }
  // Element by element where a key's neighbour is not the next number in memory.
  const int64_t span = mask.stride_k == 1 ? kSpan : 1;
  Buffer<T> values;
  for (int64_t j = 0; j < n; j += span) {
    const int64_t m = std::min(span, n - j);
    load(mask.data, mask.storage, first + j * mask.stride_k, m, values.data);
    for (int64_t l = 0; l < m; ++l) scores[j + l] += values.data[l];
  }
}

// scores <- softcap * tanh(scale / softcap * scores); slopes <- 1 - tanh^2 where it is not null.
template <class T>
inline void cap_row(const ScoreTile& t, T* scores, T* slopes) {
  const Vec<T> scale(static_cast<T>(t.scale / t.softcap)), cap(static_cast<T>(t.softcap));
  for_each_vector<T>(t.cols, [&](int64_t j) {
    const Vec<T> fraction = (Vec<T>::loadu(scores + j) * scale).tanh();
    if (slopes != nullptr) (Vec<T>(T(1)) - fraction * fraction).store(slopes + j);
    (fraction * cap).store(scores + j);
  });
}

// Scores of one row, scaled, capped and masked; what lies between the last column and the stride is
// -inf. `slopes` as cap_row, where there is a cap.
template <class T>
inline T* masked_row(const ScoreTile& t, int64_t row, T* slopes) {
  T* s = static_cast<T*>(t.scores) + row * t.stride;
  if (t.softcap > 0.0) {
    cap_row(t, s, slopes);
  } else {
    const Vec<T> scale(static_cast<T>(t.scale));
    for_each_vector<T>(t.cols, [&](int64_t j) { (Vec<T>::loadu(s + j) * scale).store(s + j); });
  }
  std::fill(s + t.cols, s + t.stride, kNothing<T>);
  const int64_t i = t.i0 + row, masked = std::clamp<int64_t>(t.masked_keys - t.j0, 0, t.cols);
  const int64_t first = std::clamp<int64_t>(i + t.low - t.j0, 0, masked);
  const int64_t last = std::clamp<int64_t>(i + t.high + 1 - t.j0, first, masked);
  std::fill(s, s + first, kNothing<T>);
  std::fill(s + last, s + masked, kNothing<T>);
  for (const MaskView& mask : t.masks) apply_mask(mask, i, t.j0 + first, last - first, s + first);
  return s;
}

template <class T>
inline T reduce_max(const T* a, int64_t n) {
  Vec<T> top(kNothing<T>);
  for_each_vector<T>(n, [&](int64_t j) { top = at::vec::maximum(top, Vec<T>::loadu(a + j)); });
  return at::vec::vec_reduce_all<T>(
      [](const Vec<T>& x, const Vec<T>& y) { return at::vec::maximum(x, y); }, top);
}

template <class T>
inline T reduce_sum(const Vec<T>& sum) {
  return at::vec::vec_reduce_all<T>([](const Vec<T>& x, const Vec<T>& y) { return x + y; }, sum);
}

// a <- exp(a - shift); returns the sum. The online softmax divides by the sum of the same numbers,
// which a fast exponential serves; but it makes a number of NaN.
template <class T>
inline T exponentiate(T* a, T shift, int64_t n) {
  const Vec<T> minus(shift);
  Vec<T> sum(T(0));
  for_each_vector<T>(n, [&](int64_t j) {
    const Vec<T> x = Vec<T>::loadu(a + j) - minus;
    const Vec<T> e = Vec<T>::blendv(x.exp_u20(), x, x.isnan());
    e.store(a + j);
    sum = sum + e;
  });
  return reduce_sum(sum);
}

// a <- exp(a - lse - correction), which nothing divides again; returns the sum.
template <class T>
inline T exponentiate_exactly(T* a, T lse, T correction, int64_t n) {
  const Vec<T> minus(lse), and_minus(correction);
  Vec<T> sum(T(0));
  for_each_vector<T>(n, [&](int64_t j) {
    const Vec<T> e = (Vec<T>::loadu(a + j) - minus - and_minus).exp();
    e.store(a + j);
    sum = sum + e;
  });
  return reduce_sum(sum);
}

template <class T>
inline void scale_row(T* a, T factor, int64_t n) {
  const Vec<T> f(factor);
  int64_t j = 0;
  for (; j + Vec<T>::size() <= n; j += Vec<T>::size()) (Vec<T>::loadu(a + j) * f).store(a + j);
  for (; j < n; ++j) a[j] *= factor;
}

// 0 or 1 / (1 - p) for the span of a row; all of the span is written.
template <class T>
inline void row_dropout_scales(const ScoreTile& t, int64_t row, int64_t col, int64_t n, T* to) {
  const uint64_t first =
      t.index0 + static_cast<uint64_t>((t.i0 + row) * t.row_elements + t.j0 + col);
  dropout_scales(t.seed, t.drop_p, first, n, to);
}

template <class T>
inline void drop_row(const ScoreTile& t, int64_t row, T* values) {
  if (!t.dropout) return;
  Buffer<T> scales{};
  for (int64_t j = 0; j < t.cols; j += kSpan) {
    const int64_t n = std::min(kSpan, t.cols - j);
    row_dropout_scales(t, row, j, n, scales.data);
    multiply(values + j, scales.data, n);
  }
}

template <class T>
void online_softmax(
    const ScoreTile& t, void* max, void* sum, void* out, int64_t out_stride, int64_t width) {
  for (int64_t row = 0; row < t.rows; ++row) {
    T* s = masked_row<T>(t, row, /*slopes=*/nullptr);
    T& running_max = static_cast<T*>(max)[row];
    T& running_sum = static_cast<T*>(sum)[row];
    const T row_max = reduce_max(s, t.cols);
    const T top = std::isnan(row_max) ? row_max : std::max(running_max, row_max);
    if (top == kNothing<T>) {  // no key so far; -inf minus -inf would be NaN
      std::fill(s, s + t.cols, T(0));
      continue;
    }
    const T shrink = std::exp(running_max - top);
    running_sum = running_sum * shrink + exponentiate(s, top, t.cols);
    if (shrink != T(1)) scale_row(static_cast<T*>(out) + row * out_stride, shrink, width);
    running_max = top;
    drop_row(t, row, s);
  }
}

template <class T>
void finish_softmax(
    const void* max, const void* sum, int64_t rows, void* out, int64_t out_stride, int64_t width,
    void* lse) {
  for (int64_t row = 0; row < rows; ++row) {
    const T top = static_cast<const T*>(max)[row], total = static_cast<const T*>(sum)[row];
    T* o = static_cast<T*>(out) + row * out_stride;
    const bool nothing = top == kNothing<T>;
    if (nothing)
      std::fill(o, o + width, T(0));
    else
      scale_row(o, T(1) / total, width);
    static_cast<T*>(lse)[row] = nothing ? kNothing<T> : top + std::log(total);
  }
}

// Probabilities of one row before dropout, from its known lse. Returns their sum, too. `slopes` as
// masked_row.
template <class T>
inline T probability_row(
    const ScoreTile& t, int64_t row, T lse, T correction, T** to, T* slopes = nullptr) {
  *to = masked_row<T>(t, row, slopes);
  if (lse != kNothing<T>) return exponentiate_exactly(*to, lse, correction, t.cols);
  std::fill(*to, *to + t.cols, T(0));
  return T(0);
}

template <class T>
void add_exponentials(const ScoreTile& t, const void* lse, void* sums) {
  T* s;
  for (int64_t row = 0; row < t.rows; ++row)
    static_cast<T*>(sums)[row] +=
        probability_row<T>(t, row, static_cast<const T*>(lse)[row], T(0), &s);
}

template <class T>
void probabilities(const ScoreTile& t, const void* lse, const void* correction, void* sums) {
  T* s;
  for (int64_t row = 0; row < t.rows; ++row) {
    const T sum = probability_row<T>(
        t, row, static_cast<const T*>(lse)[row], static_cast<const T*>(correction)[row], &s);
    if (sums != nullptr) static_cast<T*>(sums)[row] += sum;
    drop_row(t, row, s);
  }
}

template <class T>
void gradient(
    const ScoreTile& t, const void* lse, const void* correction, const void* delta,
    const WeightsGradientView& dweights, bool of_products, void* dprobabilities) {
  static_assert(kWidestTile <= kSpan, "the slopes of a row fit a buffer");
  Buffer<T> scales{}, slopes;
  const bool capped = of_products && t.softcap > 0.0;
  const Vec<T> out_scale(of_products ? static_cast<T>(t.scale) : T(1));
  for (int64_t row = 0; row < t.rows; ++row) {
    T* p;
    probability_row<T>(
        t, row, static_cast<const T*>(lse)[row], static_cast<const T*>(correction)[row], &p,
        capped ? slopes.data : nullptr);
    T* dp = static_cast<T*>(dprobabilities) + row * t.stride;
    const T* dw = dweights.data == nullptr ? nullptr
                                           : static_cast<const T*>(dweights.data) +
                                                 (t.i0 + row) * dweights.stride_q + t.j0;
    const T factor = static_cast<T>(dweights.factor);
    const Vec<T> minus(static_cast<const T*>(delta)[row]);
    for (int64_t j = 0; j < t.cols; j += kSpan) {
      const int64_t n = std::min(kSpan, t.cols - j);
      if (dw != nullptr)
        for (int64_t l = 0; l < n; ++l) dp[j + l] += factor * dw[j + l];
      if (t.dropout) {
        row_dropout_scales(t, row, j, n, scales.data);
        multiply(dp + j, scales.data, n);
      }
      for_each_vector<T>(n, [&](int64_t l) {
        const Vec<T> q = Vec<T>::loadu(p + j + l);
        (q * (Vec<T>::loadu(dp + j + l) - minus) * out_scale).store(dp + j + l);
      });
      if (t.dropout) multiply(p + j, scales.data, n);
    }
    if (capped) multiply(dp, slopes.data, t.cols);
    if (static_cast<const T*>(lse)[row] == kNothing<T>) std::fill(dp, dp + t.cols, T(0));
  }
}

template <class T>
void add_weights_delta(const ScoreTile& t, const WeightsGradientView& dweights, void* delta) {
  for (int64_t row = 0; row < t.rows; ++row) {
    const T* p = static_cast<const T*>(t.scores) + row * t.stride;
    const T* dw = static_cast<const T*>(dweights.data) + (t.i0 + row) * dweights.stride_q + t.j0;
    T sum(0);
    for (int64_t j = 0; j < t.cols; ++j) sum += p[j] * dw[j];
    static_cast<T*>(delta)[row] += static_cast<T>(dweights.factor) * sum;
  }
}

template <class T>
void row_dots(const Matrix& a, const Matrix& b, Storage storage, int64_t rows, void* out) {
  Buffer<T> x{}, y{};
  for (int64_t row = 0; row < rows; ++row) {
    T sum(0);
    for (int64_t j = 0; j < a.cols; j += kSpan) {
      const int64_t n = std::min(kSpan, a.cols - j);
      load(a, storage, row, j, n, x.data);
      load(b, storage, row, j, n, y.data);
      sum += at::vec::map2_reduce_all<T>(
          [](const Vec<T>& u, const Vec<T>& v) { return u * v; },
          [](const Vec<T>& u, const Vec<T>& v) { return u + v; }, x.data, y.data, n);
    }
    static_cast<T*>(out)[row] = sum;
  }
}

template <class T>
void load_rows(const Matrix& from, Storage storage, int64_t rows, void* to, int64_t to_stride) {
  Buffer<T> span;
  for (int64_t row = 0; row < rows; ++row) {
    T* target = static_cast<T*>(to) + row * to_stride;
    for (int64_t j = 0; j < from.cols; j += kSpan) {
      const int64_t n = std::min(kSpan, from.cols - j);
      load(from, storage, row, j, n, span.data);
      std::memcpy(target + j, span.data, n * sizeof(T));
    }
  }
}

template <class T>
void store_rows(
    const void* from, int64_t from_stride, int64_t rows, const Matrix& to, Storage storage) {
  Buffer<T> span{};
  for (int64_t row = 0; row < rows; ++row) {
    const T* source = static_cast<const T*>(from) + row * from_stride;
    for (int64_t j = 0; j < to.cols; j += kSpan) {
      const int64_t n = std::min(kSpan, to.cols - j);
      std::memcpy(span.data, source + j, n * sizeof(T));
      store(span.data, to, storage, row, j, n);
    }
  }
}

}  // namespace

inline AttentionKernels make_attention_kernels() {
  return AttentionKernels{
      {online_softmax<float>, online_softmax<double>},
      {finish_softmax<float>, finish_softmax<double>},
      {add_exponentials<float>, add_exponentials<double>},
      {probabilities<float>, probabilities<double>},
      {gradient<float>, gradient<double>},
      {add_weights_delta<float>, add_weights_delta<double>},
      {row_dots<float>, row_dots<double>},
      {load_rows<float>, load_rows<double>},
      {store_rows<float>, store_rows<double>}};
}

}  // namespace CPU_CAPABILITY
}  // namespace fused_remat::cpu
