#include "mlp_small_bwd.cuh"

namespace fused_remat::cuda {

void mlp_small_backward_bfloat16(const SmallBackward& p, Stream stream) {
  small::launch_backward<c10::BFloat16>(p, stream);
}

}  // namespace fused_remat::cuda
