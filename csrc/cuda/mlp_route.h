// How stage 1 of a backward tile is made on CUDA. Three ways give the same buffers:
//
//   library epilogues  cuBLASLt rebuilds hidden beside the pre-activation, then makes the gradient
//                      in the epilogue of dhidden's product: plain gelu_tanh layers.
//   cutlass            our GEMM for dhidden, whose epilogue reads the pre-activations and writes
//                      hidden and the gradients (cutlass_stage1.h).
//   elementwise        library products, then one kernel (mlp_kernels.h): everything else.
//
// The first whose reason is empty runs. ReLU stays out of the library's epilogues: they are
// specified as max(z, 0), which may turn a NaN into 0 where nn.ReLU passes it on. Bias gradients
// are our own sums in fp32, since the library's have the dtype of the gradient.
//
// The library's GELU sees the pre-activation before it is rounded, ours (and torch's) after. Both
// are within the rounding that any product in that dtype has, and gradients are always those of the
// rounded one.
#pragma once

#include <string>
#include <vector>

#include "../mlp.h"
#include "cublaslt.h"
#include "cutlass_stage1.h"
#include "dropout.h"

namespace fused_remat::cuda {

struct MlpBackwardCall {
  const at::Tensor& x;   // [rows, D]
  const at::Tensor& dy;  // [rows, Do]
  const MlpLayer& layer;
  const MlpTile& tile;
  const MlpResiduals& residuals;
  const MlpBuffers& buffers;
};

enum class MlpRoute { kLibraryEpilogues, kCutlass, kElementwise };

struct MlpRouteChoice {
  MlpRoute route;
  std::vector<std::string> refused;  // "name: reason" of the ways before it
};

const char* name_of(MlpRoute);

// For a tile with gradients. `capability` of the device, 90 = 9.0.
MlpRouteChoice mlp_route(const MlpBackwardCall&, int capability);

// hidden of a tile in one product with the library's GELU, which leaves the pre-activations in
// `aux` where that is given; `why_not` of it, nullptr = fits.
LtProduct lt_hidden(
    const at::Tensor& x, const MlpLayer&, const at::Tensor& hidden, const at::Tensor& aux = {});
LtEpilogue epilogue_of_hidden(const LtProduct&);
const char* why_not_lt_hidden(
    const MlpLayer&, const MlpTile&, const MlpResiduals&, const LtProduct&);

// Pre-activations [rows, features] in the tile's scratch; undefined where that has no room.
at::Tensor aux_of(const MlpBackwardCall&);

// The second product: dup <- dy w_down gelu'(aux).
LtProduct lt_gradient(const MlpBackwardCall&, const at::Tensor& aux);

// Reads pre-activations where they were kept whole, else in dup (up) and dgate (gate).
Stage1Gemm stage1_gemm(const MlpBackwardCall&);

// Raw memory of a tile's scratch tensor, in pieces.
class ChunkScratch {
 public:
  explicit ChunkScratch(const at::Tensor& scratch);
  // [rows, cols], contents undefined; an undefined tensor where it does not fit.
  at::Tensor take(int64_t rows, int64_t cols, at::ScalarType dtype);

 private:
  at::Tensor bytes_;
  int64_t used_ = 0;
};

Dropout dropout_of(const MlpTile&);

}  // namespace fused_remat::cuda
