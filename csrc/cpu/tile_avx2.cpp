#if defined(__x86_64__)
#define CPU_CAPABILITY AVX2
#define CPU_CAPABILITY_AVX2
#include "attention_kernels.h"
#include "tile_kernels.h"

namespace fused_remat::cpu {
const Kernels& kernels_avx2() {
  static const Kernels kernels = AVX2::make_kernels();
  return kernels;
}
const AttentionKernels& attention_kernels_avx2() {
  static const AttentionKernels kernels = AVX2::make_attention_kernels();
  return kernels;
}
}  // namespace fused_remat::cpu
#endif
