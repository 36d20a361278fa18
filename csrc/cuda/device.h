// The device of a call, for the host code around the kernels (csrc/cuda/*.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include "../activations.h"
#include "platform.h"

#if !defined(FUSED_REMAT_SIMT)
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

// The dispatch key that the ops are registered for: TORCH_LIBRARY_IMPL(fused_remat,
// FUSED_REMAT_CUDA_KEY, m).
#if defined(FUSED_REMAT_SIMT)
#define FUSED_REMAT_CUDA_KEY CPU
#else
#define FUSED_REMAT_CUDA_KEY CUDA
#endif

namespace fused_remat::cuda {

// While it lives, the device of `tensor` is the current one.
class OnDevice {
 public:
#if defined(FUSED_REMAT_SIMT)
  explicit OnDevice(const at::Tensor&) {}
  Stream stream() const { return {}; }
  int capability() const { return simt::capability; }
#else
  explicit OnDevice(const at::Tensor& tensor) : guard_(tensor.device()) {}
  // What the caller has made current on that device: everything is launched there.
  Stream stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }
  // 90 = 9.0.
  int capability() const {
    const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
    return 10 * device.major + device.minor;
  }

 private:
  c10::cuda::CUDAGuard guard_;
#endif
};

// Whether another library of these sources has defined the op: in a process of the tests, the one
// for GPUs and the one for the host may both be loaded, and only one may define it.
inline bool is_defined(const char* op) {
  return c10::Dispatcher::singleton().findSchema({op, ""}).has_value();
}

// The place of an activation in FUSED_REMAT_ACTIVATIONS, by which kernels know it.
inline int activation_of(const std::string& name) {
  const int index = activations::index_of(name);
  TORCH_CHECK_VALUE(index >= 0, "activation: no CUDA C++ kernel for ", name);
  return index;
}

inline Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Dtype::kFloat;
    case at::kDouble:
      return Dtype::kDouble;
    case at::kHalf:
      return Dtype::kHalf;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      TORCH_CHECK_TYPE(
          false, "the CUDA C++ kernels take float64, float32, float16 and bfloat16; got ", type);
  }
}
inline Dtype dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

}  // namespace fused_remat::cuda
