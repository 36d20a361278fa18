#if defined(__x86_64__)
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#include "tile_kernels.h"

namespace fused_remat::cpu {
const Kernels& kernels_avx512() {
  static const Kernels kernels = AVX512::make_kernels();
  return kernels;
}
}  // namespace fused_remat::cpu
#endif
