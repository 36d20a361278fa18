#define CPU_CAPABILITY DEFAULT
#define CPU_CAPABILITY_DEFAULT
#include "tile_kernels.h"

namespace fused_remat::cpu {
const Kernels& kernels_default() {
  static const Kernels kernels = DEFAULT::make_kernels();
  return kernels;
}
}  // namespace fused_remat::cpu
