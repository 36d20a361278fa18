// Narrow MLPs on the CUDA C++ backend: one kernel each way instead of streaming. Which ones:
// cuda/mlp_small.h.
#pragma once

#include <optional>

#include "../mlp.h"
#include "plan.h"

namespace fused_remat {

// Every reason why a call on `backend` is streamed; empty where one kernel does each pass.
std::vector<std::string> why_not_one_kernel(
    const at::Tensor& x, const MlpLayer&, const MlpOptions&, bool keeps);
MlpForward mlp_small_fwd(
    const at::Tensor& x, const MlpLayer&, const at::Tensor& seed, const MlpOptions&);
MlpGradients mlp_small_bwd(
    const at::Tensor& dy, const at::Tensor& x, const MlpLayer&, const at::Tensor& seed,
    const MlpOptions&, const MlpGradientMask& wanted, const MlpGradientMask& wide);

}  // namespace fused_remat
