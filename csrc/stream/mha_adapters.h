// Low-rank adapters (Hu et al. 2021) beside the projections, within a pass: y += low b^T with
// low = scale x a^T. Maths: docs/math.md, section "The block".
//
// low and its gradient, [rows, r], are narrow and exist whole; so do the factors in the dtype of
// the products and sums of their gradients. Products that a sum is wider than go through the flat
// buffer `product`.
#pragma once

#include <ATen/core/Tensor.h>

#include "../mha_ops.h"
#include "plan.h"

namespace fused_remat {

class Adapter {
 public:
  explicit operator bool() const { return a_.defined(); }
  // Zeroed sums for the gradients that are asked for.
  void begin_gradients(bool a, bool b);

  at::Tensor da, db;  // [r, in], [out, r]; undefined where not asked for

 protected:
  Adapter() = default;
  Adapter(const AdapterFactors& factors, double scale, const MlpPrecision&, int64_t rows);
  at::Tensor narrow_rows(at::ScalarType dtype) const;  // [rows, r], undefined contents

  at::Tensor a_, b_;
  double scale_ = 1.0;
  int64_t rows_ = 0;
  MlpPrecision precision_{};
  at::Tensor low_, dlow_;
};

// Of q, k or v: head groups cut the output, from column `first` on; each chunk of the input is
// whole.
class InputAdapter : public Adapter {
 public:
  InputAdapter() = default;
  InputAdapter(const AdapterFactors& f, double scale, const MlpPrecision& p, int64_t rows)
      : Adapter(f, scale, p, rows) {}

  // low of the rows of x [n, in] from r0 on: once per pass.
  void reduce(const at::Tensor& x, int64_t r0);
  // to [n, columns] += low b^T.
  void expand(const at::Tensor& to, int64_t r0, int64_t first) const;
  // What d [n, columns], the gradient of q, k or v, gives to b and to low.
  void take(
      const at::Tensor& d, int64_t r0, int64_t first, bool dx_wanted, const at::Tensor& product);
  // scale dlow of the rows from r0 on, after every group; undefined where nothing asks for it.
  at::Tensor dlow(int64_t r0, int64_t n);
  // What that gives to a (of x, read where a is asked for) and to dx, where defined.
  void give(
      const at::Tensor& dlow, const at::Tensor& x, const at::Tensor& dx, const at::Tensor& product);
};

// Of the output projection: head groups cut the input, from column `first` on.
class OutputAdapter : public Adapter {
 public:
  OutputAdapter() = default;
  OutputAdapter(const AdapterFactors& f, double scale, const MlpPrecision& p, int64_t rows)
      : Adapter(f, scale, p, rows) {}

  // low / scale += x a^T of x [n, columns].
  void reduce(const at::Tensor& x, int64_t r0, int64_t first, const at::Tensor& product);
  // low of the rows from r0 on, after every group.
  at::Tensor low(int64_t r0, int64_t n);
  const at::Tensor& b() const { return b_; }
  // scale dy b of the rows of dy [n, out] from r0 on: once per pass.
  void begin_rows(const at::Tensor& dy, int64_t r0);
  // dx [n, columns] += (scale dy b) a.
  void add_dx(const at::Tensor& dx, int64_t r0, int64_t first) const;
  void differentiate_a(const at::Tensor& x, int64_t r0, int64_t first, const at::Tensor& product);
  void differentiate_b(const at::Tensor& dy, const at::Tensor& low, const at::Tensor& product);
};

}  // namespace fused_remat
