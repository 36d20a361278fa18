// Calls to the registered MLP ops through the dispatcher: what the level above uses, so that
// tracers, dispatch modes and implementers written in Python are all seen.
#pragma once

#include "mlp.h"

namespace fused_remat::calls {

MlpForward mlp_fwd(
    const at::Tensor& x, const MlpLayer&, const at::Tensor& seed, const MlpOptions&,
    const MlpKeep&);
MlpGradients mlp_bwd(
    const at::Tensor& dy, const at::Tensor& x, const MlpLayer&, const at::Tensor& up,
    const at::Tensor& gate, const at::Tensor& seed, const MlpOptions&, const MlpGradientMask&);

// Level 3, by the backend's suffix.
void mlp_fwd_chunk(
    const std::string& backend, const at::Tensor& x, const MlpLayer&, const MlpTile&,
    const MlpResiduals&, const MlpBuffers&);
void mlp_bwd_chunk(
    const std::string& backend, const at::Tensor& x, const at::Tensor& dy, const MlpLayer&,
    const MlpTile&, const MlpResiduals&, const MlpBuffers&, const at::Tensor& db_up,
    const at::Tensor& db_gate);
void column_sums(const std::string& backend, const at::Tensor& a, const at::Tensor& out);

}  // namespace fused_remat::calls
