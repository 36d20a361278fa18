// What this library was compiled for; the build passes it as macros, which the library of the tests
// lacks.
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cutlass_stage1.h"
#include "device.h"
#include "mlp_small.h"

#ifndef FUSED_REMAT_CUDA_ARCHITECTURES
#define FUSED_REMAT_CUDA_ARCHITECTURES
#define FUSED_REMAT_CUDA_TARGETS ""
#define FUSED_REMAT_NVCC_VERSION ""
#endif

namespace fused_remat {
namespace {

// Ten times the compute capability of every architecture with machine code.
std::vector<int64_t> cuda_architectures() { return {FUSED_REMAT_CUDA_ARCHITECTURES}; }

// The same with suffixes, and with +PTX where later architectures are served, such as
// "8.0;9.0a+PTX".
std::string cuda_targets() { return FUSED_REMAT_CUDA_TARGETS; }

std::string nvcc_version() { return FUSED_REMAT_NVCC_VERSION; }

// The generations that have GEMMs made with CUTLASS.
std::vector<std::string> cutlass_kinds() {
  return {
#ifdef FUSED_REMAT_WITH_CUTLASS_SM80
      "sm80",
#endif
#ifdef FUSED_REMAT_WITH_CUTLASS_SM90A
      "sm90a",
#endif
  };
}

// By kernel the dynamic shared memory that a launch asks for at most: compiled code does not tell.
// Where it depends on the call, the sources assert that it is no more than any GPU since 8.0 has.
c10::Dict<std::string, int64_t> dynamic_shared_bytes() {
  c10::Dict<std::string, int64_t> bytes;
  for (const char* kernel :
       {"attention_delta", "attention_dkdv", "attention_dmask", "attention_dq", "attention_fwd",
        "attention_weights", "mlp_small_bwd", "mlp_small_fwd"})
    bytes.insert(kernel, mlp_small::kSharedBytes);
#ifdef FUSED_REMAT_WITH_CUTLASS_SM80
  bytes.insert("cutlass_stage1_sm80", cuda::cutlass_stage1_sm80_shared_bytes());
#endif
#ifdef FUSED_REMAT_WITH_CUTLASS_SM90A
  bytes.insert("cutlass_stage1_sm90a", cuda::cutlass_stage1_sm90a_shared_bytes());
#endif
  return bytes;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused_remat, m) {
  if (cuda::is_defined("fused_remat::cuda_architectures")) return;
  m.def("cuda_architectures() -> int[]", cuda_architectures);
  m.def("cuda_targets() -> str", cuda_targets);
  m.def("cutlass_kinds() -> str[]", cutlass_kinds);
  m.def("dynamic_shared_bytes() -> Dict(str, int)", dynamic_shared_bytes);
  m.def("nvcc_version() -> str", nvcc_version);
}

}  // namespace fused_remat
