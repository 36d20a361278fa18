// Level 3 of attention in C++ for the CPU: library GEMMs on tiles of scores, with one elementwise
// pass over each tile. A task owns what it writes and adds in a fixed order, so that the bits do
// not depend on the number of threads.
#include "../attention.h"

#include <algorithm>
#include <cmath>

#include "attention_problem.h"

namespace fused_remat::cpu {

using at::Tensor;

namespace {

// Rows of a block that starts at i0.
int64_t rows_from(const Problem& p, int64_t i0) {
  return std::min(p.tile_queries, p.length_q - i0);
}

// Task number -> (batch, head, first query).
struct QueryTask {
  int64_t b, h, i0;
};
QueryTask query_task(const Problem& p, int64_t task) {
  const int64_t blocks = p.query_blocks();
  return {task / (blocks * p.heads), task / blocks % p.heads, task % blocks * p.tile_queries};
}

template <class T>
T* row_numbers(const Tensor& t, int64_t b, int64_t h, int64_t i0) {
  return t.mutable_data_ptr<T>() + b * t.stride(0) + h * t.stride(1) + i0;
}

WeightsGradientView weights_view(const WeightsGradient& given, int64_t b, int64_t h) {
  if (!given.dweights) return {};
  const Tensor& d = *given.dweights;
  const int64_t head = d.size(1) == 1 ? 0 : h;
  return {
      static_cast<const char*>(d.const_data_ptr()) +
          (b * d.stride(0) + head * d.stride(1)) * static_cast<int64_t>(d.element_size()),
      d.stride(2), given.factor};
}

template <class T>
Rows<T> product_with_keys(
    const Scratch<T>& scratch, const Rows<T>& q, int64_t b, int64_t h, int64_t j0, int64_t cols) {
  const Rows<T> scores = scratch.scores(q.rows, cols);
  multiply(scores.tensor(), q.tensor(), scratch.k(b, h, j0, cols).transposed());
  return scores;
}

template <class T>
void forward(const Problem& p, const HeadsView& v, const HeadsView& out, const Tensor& lse) {
  const AttentionKernels& kernels = attention_kernels();
  p.for_each_task<T>(
      p.batch * p.heads * p.query_blocks(), [&](int64_t task, const Scratch<T>& scratch) {
        const auto [b, h, i0] = query_task(p, task);
        const int64_t rows = rows_from(p, i0);
        const Rows<T> q = scratch.q(b, h, i0, rows);
        const Matrix target = out.rows(b, h, i0);
        const Rows<T> sums = scratch.out(target, rows);
        std::fill_n(scratch.max(), rows, -std::numeric_limits<T>::infinity());
        std::fill_n(scratch.sum(), rows, T(0));
        p.for_visible_keys(i0, rows, 0, p.key_blocks(), [&](int64_t j0, int64_t cols) {
          const Rows<T> scores = product_with_keys(scratch, q, b, h, j0, cols);
          kernels.online_softmax[p.wide](
              p.tile(b, h, i0, rows, j0, cols, scores.data), scratch.max(), scratch.sum(),
              sums.data, sums.stride, sums.cols);
          multiply_add(sums.tensor(), scores.tensor(), scratch.v(v, b, h, j0, cols).tensor());
        });
        kernels.finish_softmax[p.wide](
            scratch.max(), scratch.sum(), rows, sums.data, sums.stride, sums.cols,
            row_numbers<T>(lse, b, h, i0));
        scratch.store(sums, target);
      });
}

// The correction of the rows' lse: 0, or for rows of large lse the log of what their probabilities
// sum to without it.
template <class T>
void correct_rows(
    const Problem& p, const Scratch<T>& scratch, const Rows<T>& q, int64_t b, int64_t h, int64_t i0,
    const T* lse, T* correction) {
  const auto large = [](T value) { return std::abs(value) > T(kLargeLse) && std::isfinite(value); };
  std::fill_n(correction, q.rows, T(0));
  if (std::none_of(lse, lse + q.rows, large)) return;
  p.for_visible_keys(i0, q.rows, 0, p.key_blocks(), [&](int64_t j0, int64_t cols) {
    const Rows<T> scores = product_with_keys(scratch, q, b, h, j0, cols);
    attention_kernels().add_exponentials[p.wide](
        p.tile(b, h, i0, q.rows, j0, cols, scores.data), lse, correction);
  });
  for (int64_t row = 0; row < q.rows; ++row)
    correction[row] = large(lse[row]) ? std::log(correction[row]) : T(0);
}

// scores <- dropped probabilities of the tile, from the known lse.
template <class T>
Rows<T> rebuild_probabilities(
    const Problem& p, const Scratch<T>& scratch, const Rows<T>& q, int64_t b, int64_t h, int64_t i0,
    int64_t j0, int64_t cols, const T* lse, const T* correction, T* sums = nullptr) {
  const Rows<T> scores = product_with_keys(scratch, q, b, h, j0, cols);
  attention_kernels().probabilities[p.wide](
      p.tile(b, h, i0, q.rows, j0, cols, scores.data), lse, correction, sums);
  return scores;
}

template <class T>
void divide_rows(const Rows<T>& m, const T* by) {
  for (int64_t row = 0; row < m.rows; ++row) {
    const T factor = by[row] == T(0) ? T(0) : T(1) / by[row];
    for (int64_t col = 0; col < m.cols; ++col) m.data[row * m.stride + col] *= factor;
  }
}

template <class T>
void delta_and_out(
    const Problem& p, const HeadsView& v, const Tensor& lse, const HeadsView& dout,
    const WeightsGradient& weights, bool rebuild, const HeadsView& out, const Tensor& delta,
    const Tensor& correction) {
  const AttentionKernels& kernels = attention_kernels();
  p.for_each_task<T>(
      p.batch * p.heads * p.query_blocks(), [&](int64_t task, const Scratch<T>& scratch) {
        const auto [b, h, i0] = query_task(p, task);
        const int64_t rows = rows_from(p, i0);
        const Matrix target = out.rows(b, h, i0);
        T* const deltas = row_numbers<T>(delta, b, h, i0);
        T* const corrections = row_numbers<T>(correction, b, h, i0);
        const T* const row_lse = row_numbers<T>(lse, b, h, i0);
        const Rows<T> q = scratch.q(b, h, i0, rows);
        const WeightsGradientView dweights = weights_view(weights, b, h);
        correct_rows(p, scratch, q, b, h, i0, row_lse, corrections);
        Rows<T> sums{};
        if (rebuild) sums = scratch.out(target, rows);
        T* const weights_delta = scratch.sum();
        std::fill_n(weights_delta, rows, T(0));
        std::fill_n(scratch.max(), rows, T(0));
        if (rebuild || dweights.data != nullptr)
          p.for_visible_keys(i0, rows, 0, p.key_blocks(), [&](int64_t j0, int64_t cols) {
            const Rows<T> scores = rebuild_probabilities(
                p, scratch, q, b, h, i0, j0, cols, row_lse, corrections, scratch.max());
            if (rebuild)
              multiply_add(sums.tensor(), scores.tensor(), scratch.v(v, b, h, j0, cols).tensor());
            if (dweights.data != nullptr)
              kernels.add_weights_delta[p.wide](
                  p.tile(b, h, i0, rows, j0, cols, scores.data), dweights, weights_delta);
          });
        if (rebuild) {
          // The known lse is rounded, and probabilities sum to 1 only nearly: delta has to be that
          // of the normalised out, or the gradient of the scores would not sum to 0.
          divide_rows(sums, scratch.max());
          scratch.store(sums, target);
        }
        kernels.row_dots[p.wide](target, dout.rows(b, h, i0), p.storage, rows, deltas);
        for (int64_t row = 0; row < rows; ++row) deltas[row] += weights_delta[row];
      });
}

// What backward reads besides the problem, and what it fills.
struct Backward {
  const Problem& p;
  HeadsView v, dout;
  const Tensor &lse, &correction, &delta;
  const WeightsGradient& weights;
  const AttentionGradients& gradients;
};

template <class T>
Rows<T> rows_of(const Tensor& gradient, int64_t b, int64_t h, int64_t l0, int64_t rows) {
  const Matrix m = HeadsView(gradient).rows(b, h, l0);
  return {static_cast<T*>(m.data), rows, m.cols, m.stride};
}

// scores <- dropped probabilities, dscores <- the gradient of the masked scores, or of q k^T where
// `of_products`.
template <class T>
void differentiate_tile(
    const Backward& call, const Scratch<T>& scratch, const Rows<T>& q, const Rows<T>& dout,
    int64_t b, int64_t h, int64_t i0, int64_t j0, int64_t cols, const Rows<T>& k,
    bool of_products) {
  const Problem& p = call.p;
  const Rows<T> scores = scratch.scores(q.rows, cols), dscores = scratch.dscores(q.rows, cols);
  multiply(scores.tensor(), q.tensor(), k.transposed());
  multiply(dscores.tensor(), dout.tensor(), scratch.v(call.v, b, h, j0, cols).transposed());
  attention_kernels().gradient[p.wide](
      p.tile(b, h, i0, q.rows, j0, cols, scores.data), row_numbers<T>(call.lse, b, h, i0),
      row_numbers<T>(call.correction, b, h, i0), row_numbers<T>(call.delta, b, h, i0),
      weights_view(call.weights, b, h), of_products, dscores.data);
}

// One query block against a range of key blocks: its part of dq, and of dk and dv.
template <class T>
void backward_rows(
    const Backward& call, const Scratch<T>& scratch, int64_t b, int64_t h, int64_t i0,
    int64_t first_block, int64_t last_block, bool with_dq, bool with_dkv) {
  const Problem& p = call.p;
  const AttentionGradients& out = call.gradients;
  const int64_t rows = rows_from(p, i0), kv = p.kv_head(h);
  const Rows<T> q = scratch.q(b, h, i0, rows), dout = scratch.dout(call.dout, b, h, i0, rows);
  p.for_visible_keys(i0, rows, first_block, last_block, [&](int64_t j0, int64_t cols) {
    const Rows<T> k = scratch.k(b, h, j0, cols);
    differentiate_tile(call, scratch, q, dout, b, h, i0, j0, cols, k, /*of_products=*/true);
    const Rows<T> scores = scratch.scores(rows, cols), dscores = scratch.dscores(rows, cols);
    if (with_dkv && out.dv.defined())
      multiply_add(
          rows_of<T>(out.dv, b, kv, j0, cols).tensor(), scores.transposed(), dout.tensor());
    if (with_dkv && out.dk.defined())
      multiply_add(rows_of<T>(out.dk, b, kv, j0, cols).tensor(), dscores.transposed(), q.tensor());
    if (with_dq && out.dq.defined())
      multiply_add(rows_of<T>(out.dq, b, h, i0, rows).tensor(), dscores.tensor(), k.tensor());
  });
}

// Every block of scores once where there are enough key-value heads for all threads; else once for
// dk and dv, by key blocks, and once for dq, by query blocks. The sums have the same terms in the
// same order either way.
template <class T>
void backward(const Backward& call) {
  const Problem& p = call.p;
  const int64_t pairs = p.batch * p.kv_heads, group = p.heads / p.kv_heads;
  const auto key_side = [&](const Scratch<T>& scratch, int64_t pair, int64_t first, int64_t last,
                            bool with_dq) {
    const int64_t b = pair / p.kv_heads, kv = pair % p.kv_heads;
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
      for (int64_t i0 = 0; i0 < p.length_q; i0 += p.tile_queries)
        backward_rows(call, scratch, b, h, i0, first, last, with_dq, /*with_dkv=*/true);
  };
  if (pairs >= at::get_num_threads()) {
    p.for_each_task<T>(pairs, [&](int64_t pair, const Scratch<T>& scratch) {
      key_side(scratch, pair, 0, p.key_blocks(), /*with_dq=*/true);
    });
    return;
  }
  if (call.gradients.dk.defined() || call.gradients.dv.defined())
    p.for_each_task<T>(pairs * p.key_blocks(), [&](int64_t task, const Scratch<T>& scratch) {
      const int64_t block = task % p.key_blocks();
      key_side(scratch, task / p.key_blocks(), block, block + 1, /*with_dq=*/false);
    });
  if (call.gradients.dq.defined())
    p.for_each_task<T>(
        p.batch * p.heads * p.query_blocks(), [&](int64_t task, const Scratch<T>& scratch) {
          const auto [b, h, i0] = query_task(p, task);
          backward_rows(
              call, scratch, b, h, i0, 0, p.key_blocks(), /*with_dq=*/true, /*with_dkv=*/false);
        });
}

// The gradient of a mask: sums of the gradient of the scores over the dims that the mask does not
// have. A task owns a query block of one (batch, head) of the mask.
template <class T>
void mask_gradient(const Backward& call, const Tensor& dmask) {
  const Problem& p = call.p;
  const auto stride = [&](int64_t dim) { return dmask.size(dim) == 1 ? 0 : dmask.stride(dim); };
  const bool by_rows = dmask.size(2) > 1;
  const int64_t blocks = by_rows ? p.query_blocks() : 1;
  p.for_each_task<T>(
      dmask.size(0) * dmask.size(1) * blocks, [&](int64_t task, const Scratch<T>& scratch) {
        const int64_t mask_b = task / (dmask.size(1) * blocks);
        const int64_t mask_h = task / blocks % dmask.size(1), block = task % blocks;
        T* const sums = dmask.mutable_data_ptr<T>() + mask_b * stride(0) + mask_h * stride(1);
        for (int64_t b = mask_b; b < p.batch; b += dmask.size(0))
          for (int64_t h = mask_h; h < p.heads; h += dmask.size(1))
            for (int64_t i = by_rows ? block : 0; i < (by_rows ? block + 1 : p.query_blocks());
                 ++i) {
              const int64_t i0 = i * p.tile_queries, rows = rows_from(p, i0);
              const Rows<T> q = scratch.q(b, h, i0, rows);
              const Rows<T> dout = scratch.dout(call.dout, b, h, i0, rows);
              p.for_visible_keys(i0, rows, 0, p.key_blocks(), [&](int64_t j0, int64_t cols) {
                differentiate_tile(
                    call, scratch, q, dout, b, h, i0, j0, cols, scratch.k(b, h, j0, cols),
                    /*of_products=*/false);
                const Rows<T> dscores = scratch.dscores(rows, cols);
                for (int64_t row = 0; row < rows; ++row)
                  for (int64_t col = 0; col < std::min(cols, p.masked_keys() - j0); ++col)
                    sums[(i0 + row) * stride(2) + (j0 + col) * stride(3)] +=
                        dscores.data[row * dscores.stride + col];
              });
            }
      });
}

template <class T>
void add_weights(const Problem& p, const Tensor& lse, double factor, const Tensor& weights) {
  const bool averaged = weights.size(1) == 1;
  const int64_t owners = averaged ? 1 : p.heads, blocks = p.query_blocks();
  p.for_each_task<T>(p.batch * owners * blocks, [&](int64_t task, const Scratch<T>& scratch) {
    const int64_t b = task / (owners * blocks), owner = task / blocks % owners;
    const int64_t i0 = task % blocks * p.tile_queries, rows = rows_from(p, i0);
    for (int64_t h = owner; h < p.heads; h += owners) {
      const Rows<T> q = scratch.q(b, h, i0, rows);
      const T* const row_lse = row_numbers<T>(lse, b, h, i0);
      T* const correction = scratch.sum();
      correct_rows(p, scratch, q, b, h, i0, row_lse, correction);
      p.for_visible_keys(i0, rows, 0, p.key_blocks(), [&](int64_t j0, int64_t cols) {
        const Rows<T> scores =
            rebuild_probabilities(p, scratch, q, b, h, i0, j0, cols, row_lse, correction);
        const Rows<T> sums = rows_of<T>(weights, b, owner, i0, rows);
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t col = 0; col < cols; ++col)
            sums.data[row * sums.stride + j0 + col] +=
                static_cast<T>(factor) * scores.data[row * scores.stride + col];
      });
    }
  });
}

// q, k and what goes with them, checked against each other.
Problem checked(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& out, const Tensor& rows) {
  const Problem p(q, k, v.dim() == 4 ? v.size(3) : 0, attending);
  p.check(v, /*of_keys=*/true, p.value_width);
  p.check(out, /*of_keys=*/false, p.value_width);
  p.check_rows(rows);
  TORCH_CHECK_TYPE(
      v.scalar_type() == q.scalar_type() && out.scalar_type() == q.scalar_type(),
      "cpp attention: q, k, v, out and dout share a dtype");
  return p;
}

void check_gradient(const Problem& p, const Tensor& t, bool of_keys, int64_t columns) {
  if (!t.defined()) return;
  p.check(t, of_keys, columns);
  TORCH_CHECK_TYPE(
      t.scalar_type() == (p.wide ? at::kDouble : at::kFloat),
      "cpp attention: gradients are in the accumulation dtype, got ", t.scalar_type());
}

}  // namespace

void attention_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& out, const Tensor& lse) {
  const Problem p = checked(q, k, v, attending, out, lse);
  const auto run = p.wide ? forward<double> : forward<float>;
  run(p, HeadsView(v), HeadsView(out), lse);
}

void attention_delta(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& lse, const Tensor& dout, const WeightsGradient& weights, bool rebuild,
    const Tensor& out, const Tensor& delta, const Tensor& correction) {
  const Problem p = checked(q, k, v, attending, out, lse);
  p.check(dout, /*of_keys=*/false, p.value_width);
  p.check_rows(delta);
  p.check_rows(correction);
  const auto run = p.wide ? delta_and_out<double> : delta_and_out<float>;
  run(p, HeadsView(v), lse, HeadsView(dout), weights, rebuild, HeadsView(out), delta, correction);
}

void attention_bwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Attending& attending,
    const Tensor& lse, const Tensor& correction, const Tensor& delta, const Tensor& dout,
    const OptionalTensor&, const WeightsGradient& weights, const AttentionGradients& gradients) {
  const Problem p = checked(q, k, v, attending, dout, lse);
  p.check_rows(delta);
  p.check_rows(correction);
  check_gradient(p, gradients.dq, /*of_keys=*/false, p.width);
  check_gradient(p, gradients.dk, /*of_keys=*/true, p.width);
  check_gradient(p, gradients.dv, /*of_keys=*/true, p.value_width);
  const Backward call{p, HeadsView(v), HeadsView(dout), lse, correction, delta, weights, gradients};
  if (gradients.dq.defined() || gradients.dk.defined() || gradients.dv.defined())
    (p.wide ? backward<double> : backward<float>)(call);
  for (const Tensor& dmask : {gradients.dattn_mask, gradients.dkey_mask})
    if (dmask.defined()) (p.wide ? mask_gradient<double> : mask_gradient<float>)(call, dmask);
}

void attention_weights(
    const Tensor& q, const Tensor& k, const Attending& attending, const Tensor& lse, double factor,
    const Tensor& weights) {
  const Problem p(q, k, /*value_width=*/0, attending);
  p.check_rows(lse);
  TORCH_CHECK_VALUE(
      weights.dim() == 4 && weights.scalar_type() == lse.scalar_type() &&
          (weights.size(1) == 1 || weights.size(1) == p.heads) && weights.size(0) == p.batch &&
          weights.size(2) == p.length_q && weights.size(3) == p.length_k,
      "cpp attention: weights must be [B, 1 or H, Lq, Lk] like lse, got ", weights.sizes());
  (p.wide ? add_weights<double> : add_weights<float>)(p, lse, factor, weights);
}

}  // namespace fused_remat::cpu
