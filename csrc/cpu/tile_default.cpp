#define CPU_CAPABILITY DEFAULT
#define CPU_CAPABILITY_DEFAULT
#include "attention_kernels.h"
#include "tile_kernels.h"

namespace fused_remat::cpu {
const Kernels& kernels_default() {
  static const Kernels kernels = DEFAULT::make_kernels();
  return kernels;
}
const AttentionKernels& attention_kernels_default() {
  static const AttentionKernels kernels = DEFAULT::make_attention_kernels();
  return kernels;
}
}  // namespace fused_remat::cpu
