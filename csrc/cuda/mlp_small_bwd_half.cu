#include "mlp_small_bwd.cuh"

namespace fused_remat::cuda {

void mlp_small_backward_half(const SmallBackward& p, Stream stream) {
  small::launch_backward<c10::Half>(p, stream);
}

}  // namespace fused_remat::cuda
