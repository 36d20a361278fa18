#include "mlp_small.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "../cuda/mlp_small.h"
#include "../mlp_calls.h"
#include "tiles.h"

namespace fused_remat {

using at::Tensor;

std::vector<std::string> why_not_one_kernel(
    const Tensor& x, const MlpLayer& layer, const MlpOptions& options, bool keeps) {
  if (options.backend != "cuda") return {"the backend is " + options.backend};
  const MlpSizes sizes = mlp_sizes(x, layer);
  mlp_small::Call call{
      sizes.rows, sizes.d_in, sizes.d_out,        sizes.hidden_features, options.compute_dtype,
      {},         keeps,      bool(options.norm), sizes.adapted()};
  call.operands = {x.scalar_type(), layer.w_up.scalar_type(), layer.w_down.scalar_type()};
  for (const OptionalTensor& t : {layer.b_up, layer.b_down, layer.w_gate, layer.b_gate})
    if (t) call.operands.push_back(t->scalar_type());
  return mlp_small::why_not(call);
}

MlpForward mlp_small_fwd(
    const Tensor& x, const MlpLayer& layer, const Tensor& seed, const MlpOptions& options) {
  const int64_t rows = row_count(x), d_out = layer.w_down.size(0);
  const at::TensorOptions made = x.options().dtype(options.compute_dtype);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = d_out;
  const Tensor y = at::empty(shape, made), nothing = at::empty({rows, 0}, made);
  calls::mlp_small_fwd(as_rows(x), layer, seed, options, y.view({rows, d_out}));
  return {y, nothing, at::empty({rows, 0}, made)};
}

MlpGradients mlp_small_bwd(
    const Tensor& dy, const Tensor& x, const MlpLayer& layer, const Tensor& seed,
    const MlpOptions& options, const MlpGradientMask& wanted, const MlpGradientMask& wide) {
  MlpGradients made;
  const OptionalTensor of[kMlpGradients] = {
      x, layer.w_up, layer.w_down, layer.b_up, layer.b_down, layer.w_gate, layer.b_gate};
  for (int i = 0; i < kMlpGradients; ++i) {
    const Tensor& operand = of[i] ? *of[i] : x;
    if (!wanted[i])
      made[i] = at::empty({0}, operand.options());
    else if (i == kDx)  // x may overlap itself or skip memory; its gradient is dense
      made[i] = at::empty(x.sizes(), x.options());
    else
      made[i] = at::empty_like(
          operand, operand.options().dtype(wide[i] ? at::kFloat : operand.scalar_type()));
  }
  MlpGradients rows = made;
  for (int i = 0; i < kMlpGradients; ++i)
    if (!wanted[i]) rows[i] = Tensor();
  if (wanted[kDx]) rows[kDx] = made[kDx].view({row_count(x), x.size(-1)});
  calls::mlp_small_bwd(as_rows(dy), as_rows(x), layer, seed, options, rows);
  return made;
}

}  // namespace fused_remat
