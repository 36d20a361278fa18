#include "mha_adapters.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tiles.h"

namespace fused_remat {

using at::Tensor;

namespace {

// to <- factor a b, rounded once.
void scaled_product(Tensor to, const Tensor& a, const Tensor& b, double factor) {
  at::addmm_out(to, to, a, b, /*beta=*/0, /*alpha=*/factor);
}

}  // namespace

Adapter::Adapter(
    const AdapterFactors& factors, double scale, const MlpPrecision& precision, int64_t rows)
    : scale_(scale), rows_(rows), precision_(precision) {
  if (!factors.a) return;
  a_ = factors.a->to(precision.gemm).contiguous();
  b_ = factors.b->to(precision.gemm).contiguous();
}

void Adapter::begin_gradients(bool a, bool b) {
  const auto wide = [&](const Tensor& t) {
    return at::zeros(t.sizes(), t.options().dtype(precision_.accumulate));
  };
  if (a) da = wide(a_);
  if (b) db = wide(b_);
}

Tensor Adapter::narrow_rows(at::ScalarType dtype) const {
  return at::empty({rows_, a_.size(0)}, a_.options().dtype(dtype));
}

void InputAdapter::reduce(const Tensor& x, int64_t r0) {
  if (!low_.defined()) low_ = narrow_rows(precision_.gemm);
  scaled_product(low_.narrow(0, r0, x.size(0)), x, a_.t(), scale_);
}

void InputAdapter::expand(const Tensor& to, int64_t r0, int64_t first) const {
  add_product(
      to, low_.narrow(0, r0, to.size(0)), b_.narrow(0, first, to.size(1)).t(), /*first=*/false, {});
}

void InputAdapter::take(
    const Tensor& d, int64_t r0, int64_t first, bool dx_wanted, const Tensor& product) {
  const int64_t n = d.size(0), columns = d.size(1);
  if (db.defined())
    add_product(
        db.narrow(0, first, columns), d.t(), low_.narrow(0, r0, n), /*first=*/false, product);
  if (!da.defined() && !dx_wanted) return;
  if (!dlow_.defined()) dlow_ = narrow_rows(precision_.accumulate).zero_();
  add_product(dlow_.narrow(0, r0, n), d, b_.narrow(0, first, columns), /*first=*/false, product);
}

Tensor InputAdapter::dlow(int64_t r0, int64_t n) {
  return dlow_.defined() ? dlow_.narrow(0, r0, n).mul_(scale_) : Tensor();
}

void InputAdapter::give(
    const Tensor& dlow, const Tensor& x, const Tensor& dx, const Tensor& product) {
  if (da.defined()) add_product(da, dlow.t(), x, /*first=*/false, product);
  if (dx.defined()) add_product(dx, dlow, a_, /*first=*/false, product);
}

void OutputAdapter::reduce(const Tensor& x, int64_t r0, int64_t first, const Tensor& product) {
  if (!low_.defined()) low_ = narrow_rows(precision_.accumulate);
  const Tensor a = a_.narrow(1, first, x.size(1));
  add_product(low_.narrow(0, r0, x.size(0)), x, a.t(), /*first=*/first == 0, product);
}

Tensor OutputAdapter::low(int64_t r0, int64_t n) { return low_.narrow(0, r0, n).mul_(scale_); }

void OutputAdapter::begin_rows(const Tensor& dy, int64_t r0) {
  if (!dlow_.defined()) dlow_ = narrow_rows(precision_.gemm);
  scaled_product(dlow_.narrow(0, r0, dy.size(0)), dy, b_, scale_);
}

void OutputAdapter::add_dx(const Tensor& dx, int64_t r0, int64_t first) const {
  add_product(
      dx, dlow_.narrow(0, r0, dx.size(0)), a_.narrow(1, first, dx.size(1)), /*first=*/false, {});
}

void OutputAdapter::differentiate_a(
    const Tensor& x, int64_t r0, int64_t first, const Tensor& product) {
  if (!da.defined()) return;
  add_product(
      da.narrow(1, first, x.size(1)), dlow_.narrow(0, r0, x.size(0)).t(), x, /*first=*/false,
      product);
}

void OutputAdapter::differentiate_b(const Tensor& dy, const Tensor& low, const Tensor& product) {
  add_product(db, dy.t(), low, /*first=*/false, product);
}

}  // namespace fused_remat
