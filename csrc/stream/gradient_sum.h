#pragma once

#include <ATen/ops/empty_like.h>

#include "tiles.h"

namespace fused_remat {

// A gradient whose tiles are sums over the other axis. The sum lives in the gradient itself where
// that is as wide as a sum must be or has one term; else in the workspace, if the gradient's axis
// is the outer loop (a chunk is finished before the next begins), else in an fp32 tensor of the
// gradient's full size.
class GradientSum {
 public:
  GradientSum() = default;
  GradientSum(
      const at::Tensor& gradient, int64_t axis, bool outer, bool one_term, int64_t width,
      const MlpPrecision& precision, Workspace& workspace)
      : gradient_(gradient), axis_(axis) {
    const bool direct = gradient.scalar_type() == precision.accumulate ||
                        (one_term && gradient.scalar_type() == precision.gemm);
    if (direct) {
      whole_ = gradient;
    } else if (outer) {
      chunk_ = workspace.take(gradient.size(1 - axis) * width, precision.accumulate);
    } else {
      whole_ = at::empty_like(gradient, gradient.options().dtype(precision.accumulate));
    }
  }

  // Whether the gradient was asked for.
  explicit operator bool() const { return gradient_.defined(); }

  at::Tensor tile(int64_t start, int64_t width) const {
    if (whole_.defined()) return whole_.narrow(axis_, start, width);
    return axis_ == 0 ? matrix(chunk_, width, gradient_.size(1))
                      : matrix(chunk_, gradient_.size(0), width);
  }
  void finish_chunk(int64_t start, int64_t width) const {
    if (chunk_.defined()) gradient_.narrow(axis_, start, width).copy_(tile(start, width));
  }
  void finish() const {
    if (whole_.defined() && !whole_.is_same(gradient_)) gradient_.copy_(whole_);
  }

 private:
  at::Tensor gradient_, whole_, chunk_;
  int64_t axis_ = 0;
};

}  // namespace fused_remat
