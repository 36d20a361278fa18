// What the CUTLASS launchers share.
#pragma once

#include <cutlass/cutlass.h>

#include <stdexcept>
#include <string>

#include "cutlass_stage1.h"

namespace fused_remat::cuda::stage1 {

inline void check_status(const char* name, cutlass::Status status) {
  if (status == cutlass::Status::kSuccess) return;
  std::string reason = cutlass::cutlassGetStatusString(status);
  if (status == cutlass::Status::kErrorInternal)
    reason += std::string(" (") + cudaGetErrorString(cudaGetLastError()) + ")";
  throw std::runtime_error(std::string(name) + ": CUTLASS reports: " + reason);
}

// Initialises and launches one of CUTLASS's device-level GEMMs.
template <class Gemm>
void run_gemm(const char* name, const typename Gemm::Arguments& arguments, Stream stream) {
  check_status(name, Gemm::can_implement(arguments));
  if (Gemm::get_workspace_size(arguments) != 0)
    throw std::runtime_error(std::string(name) + ": CUTLASS wants a workspace; none is planned");
  Gemm gemm;
  check_status(name, gemm.initialize(arguments, nullptr, stream));
  check_status(name, gemm.run(stream));
}

// Calls Run<T, gated>::run(gemm, stream).
template <template <class, bool> class Run>
void dispatch(const char* name, const Stage1Gemm& gemm, Stream stream) {
  if (const char* reason = why_not_stage1_gemm(gemm))
    throw std::invalid_argument(std::string(name) + ": " + reason);
  if (gemm.rows == 0 || gemm.features == 0) return;
  const bool half = gemm.dtype == Dtype::kHalf;
  if (gemm.gated())
    half ? Run<c10::Half, true>::run(gemm, stream) : Run<c10::BFloat16, true>::run(gemm, stream);
  else
    half ? Run<c10::Half, false>::run(gemm, stream) : Run<c10::BFloat16, false>::run(gemm, stream);
}

}  // namespace fused_remat::cuda::stage1
