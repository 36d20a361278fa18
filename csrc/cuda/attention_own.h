// Our own attention kernels on a head group, with the signatures of ../attention.h.
#pragma once

#include "../attention.h"
#include "attention_routes.h"

namespace fused_remat::cuda::own {

FUSED_REMAT_ATTENTION_IMPLEMENTER

// Why these kernels cannot take such a call; nothing where they can.
std::vector<std::string> why_not(const AttentionFacts&);

}  // namespace fused_remat::cuda::own
