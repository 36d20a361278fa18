// Calls to the registered level-3 ops of the MLP, by the backend's suffix, through the dispatcher:
// what the level above uses, so that tracers, dispatch modes and implementers written in Python are
// all seen.
#pragma once

#include "mlp.h"

namespace fused_remat::calls {

void mlp_fwd_chunk(
    const std::string& backend, const at::Tensor& x, const MlpLayer&, const MlpTile&,
    const MlpResiduals&, const MlpBuffers&);
void mlp_bwd_chunk(
    const std::string& backend, const at::Tensor& x, const at::Tensor& dy, const MlpLayer&,
    const MlpTile&, const MlpResiduals&, const MlpBuffers&, const at::Tensor& db_up,
    const at::Tensor& db_gate);
void column_sums(const std::string& backend, const at::Tensor& a, const at::Tensor& out);

// A narrow MLP by one kernel (cuda/mlp_small.h). x [M, D], y [M, Do].
void mlp_small_fwd(
    const at::Tensor& x, const MlpLayer&, const at::Tensor& seed, const MlpOptions&,
    const at::Tensor& y);
// Fills in the gradients that are defined; dx is [M, D].
void mlp_small_bwd(
    const at::Tensor& dy, const at::Tensor& x, const MlpLayer&, const at::Tensor& seed,
    const MlpOptions&, const MlpGradients&);

}  // namespace fused_remat::calls
