// Attention by torch's own kernels: their operators, called by name, on pieces of a head group.
#pragma once

#include "attention_routes.h"

namespace fused_remat::cuda {

// As attention_fwd of ../attention.h, by a route of torch's that has nothing against the call.
void library_attention_fwd(
    Route, const AttentionFacts&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const Attending&, const at::Tensor& out, const at::Tensor& lse);

// As attention_bwd, of which these kernels take `out` instead of delta and correction. They know
// rows by lse alone: without masks a score whose lse has too few digits has itself been rounded as
// coarsely.
void library_attention_bwd(
    Route, const AttentionFacts&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const Attending&, const at::Tensor& lse, const at::Tensor& dout, const at::Tensor& out,
    const AttentionGradients&);

}  // namespace fused_remat::cuda
