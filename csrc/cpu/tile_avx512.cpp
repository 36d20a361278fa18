#if defined(__x86_64__)
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#include "attention_kernels.h"
#include "tile_kernels.h"

namespace fused_remat::cpu {
const Kernels& kernels_avx512() {
  static const Kernels kernels = AVX512::make_kernels();
  return kernels;
}
const AttentionKernels& attention_kernels_avx512() {
  static const AttentionKernels kernels = AVX512::make_attention_kernels();
  return kernels;
}
}  // namespace fused_remat::cpu
#endif
