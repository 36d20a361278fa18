#if defined(__x86_64__)
#define CPU_CAPABILITY AVX2
#define CPU_CAPABILITY_AVX2
#include "tile_kernels.h"

namespace fused_remat::cpu {
const Kernels& kernels_avx2() {
  static const Kernels kernels = AVX2::make_kernels();
  return kernels;
}
}  // namespace fused_remat::cpu
#endif
