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

}  // namespace fused_remat::calls
