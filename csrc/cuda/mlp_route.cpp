#include "mlp_route.h"

#include "../activations.h"
#include "../philox.h"
#include "device.h"

namespace fused_remat::cuda {

using at::Tensor;

namespace {

// Pieces of a tile's scratch start on these.
constexpr int64_t kScratchAlignment = 64;

const char* why_not_library_epilogues(const MlpBackwardCall& call) {
  const Tensor aux = aux_of(call);
  const LtProduct hidden = lt_hidden(call.x, call.layer, call.buffers.hidden, aux);
  if (const char* reason = why_not_lt_hidden(call.layer, call.tile, call.residuals, hidden))
    return reason;
  if (!aux.defined()) return "the scratch has no room for the pre-activations";
  return why_not_lt(lt_gradient(call, aux), LtEpilogue::kGeluGradient);
}

bool dense_rows(const Tensor& matrix) { return matrix.stride(1) == 1 || matrix.size(1) == 1; }

template <class Pointer>
RowMajor<Pointer> row_major(const Tensor& matrix) {
  if (matrix.numel() == 0) return {};
  if constexpr (std::is_same_v<Pointer, void*>)
    return {matrix.mutable_data_ptr(), matrix.stride(0)};
  else
    return {matrix.const_data_ptr(), matrix.stride(0)};
}

const char* why_not_cutlass(const MlpBackwardCall& call, int capability) {
  if (stage1_kernel(capability) == Stage1Kernel::kNone)
    return "no kernel was compiled for this device";
  if (!dense_rows(call.dy) || !dense_rows(call.layer.w_down))
    return "rows of dy or w_down are not dense";
  for (const Tensor& matrix : {call.dy, call.layer.w_down})
    if (matrix.scalar_type() != call.buffers.hidden.scalar_type())
      return "the operands have different dtypes";
  return why_not_stage1_gemm(stage1_gemm(call));
}

}  // namespace

const char* name_of(MlpRoute route) {
  switch (route) {
    case MlpRoute::kLibraryEpilogues:
      return "library epilogues";
    case MlpRoute::kCutlass:
      return "cutlass";
    case MlpRoute::kElementwise:
      return "elementwise";
  }
  return "";
}

MlpRouteChoice mlp_route(const MlpBackwardCall& call, int capability) {
  MlpRouteChoice choice{MlpRoute::kElementwise, {}};
  const auto fits = [&](MlpRoute route, const char* reason) {
    if (reason == nullptr)
      choice.route = route;
    else
      choice.refused.push_back(std::string(name_of(route)) + ": " + reason);
    return reason == nullptr;
  };
  fits(MlpRoute::kLibraryEpilogues, why_not_library_epilogues(call)) ||
      fits(MlpRoute::kCutlass, why_not_cutlass(call, capability));
  return choice;
}

LtProduct lt_hidden(
    const Tensor& x, const MlpLayer& layer, const Tensor& hidden, const Tensor& aux) {
  return {x, layer.w_up.t(), layer.b_up, aux, hidden};
}

LtEpilogue epilogue_of_hidden(const LtProduct& product) {
  return product.aux.defined() ? LtEpilogue::kGeluAux : LtEpilogue::kGelu;
}

const char* why_not_lt_hidden(
    const MlpLayer& layer, const MlpTile& tile, const MlpResiduals& residuals,
    const LtProduct& product) {
  if (layer.gated()) return "the layer is gated";
  if (activation_of(tile.activation) != activations::kGeluTanhIndex)
    return "the activation is not gelu_tanh";
  if (tile.dropout_p > 0.0) return "hidden values are dropped";
  if (residuals.up.size(1) > 0) return "pre-activations are kept";
  return why_not_lt(product, epilogue_of_hidden(product));
}

Tensor aux_of(const MlpBackwardCall& call) {
  const Tensor& hidden = call.buffers.hidden;
  return ChunkScratch(call.buffers.scratch)
      .take(hidden.size(0), hidden.size(1), hidden.scalar_type());
}

LtProduct lt_gradient(const MlpBackwardCall& call, const Tensor& aux) {
  return {call.dy, call.layer.w_down, std::nullopt, aux, call.buffers.dup};
}

Stage1Gemm stage1_gemm(const MlpBackwardCall& call) {
  const MlpBuffers& buffers = call.buffers;
  const int64_t features = buffers.hidden.size(1);
  const auto pre = [&](const Tensor& kept, const Tensor& buffer) {
    return row_major<const void*>(kept.size(1) == features ? kept : buffer);
  };
  Stage1Gemm gemm{};
  gemm.dtype = dtype_of(buffers.hidden);
  gemm.rows = buffers.hidden.size(0);
  gemm.features = features;
  gemm.d_out = call.dy.size(1);
  gemm.dy = row_major<const void*>(call.dy);
  gemm.w_down = row_major<const void*>(call.layer.w_down);
  gemm.up = pre(call.residuals.up, buffers.dup);
  gemm.hidden = row_major<void*>(buffers.hidden);
  gemm.dup = row_major<void*>(buffers.dup);
  if (call.layer.gated()) {
    gemm.gate = pre(call.residuals.gate, buffers.dgate);
    gemm.dgate = row_major<void*>(buffers.dgate);
  }
  gemm.activation = activation_of(call.tile.activation);
  const Dropout dropout = dropout_of(call.tile);
  gemm.seed = dropout.seed;
  gemm.drop_threshold = dropout.threshold;
  gemm.keep_scale = static_cast<float>(dropout.scale);
  gemm.row0 = dropout.row0;
  gemm.feature0 = dropout.feature0;
  gemm.hidden_features = dropout.hidden_features;
  return gemm;
}

ChunkScratch::ChunkScratch(const Tensor& scratch) {
  if (scratch.numel() > 0 && scratch.is_contiguous()) bytes_ = scratch.view({-1}).view(at::kByte);
}

Tensor ChunkScratch::take(int64_t rows, int64_t cols, at::ScalarType dtype) {
  if (!bytes_.defined()) return {};
  const auto address = reinterpret_cast<uintptr_t>(bytes_.const_data_ptr()) + used_;
  const int64_t start = used_ + static_cast<int64_t>(-address & (kScratchAlignment - 1));
  const int64_t bytes = rows * cols * static_cast<int64_t>(c10::elementSize(dtype));
  if (start + bytes > bytes_.numel()) return {};
  used_ = start + bytes;
  return bytes_.narrow(0, start, bytes).view(dtype).view({rows, cols});
}

Dropout dropout_of(const MlpTile& tile) {
  if (tile.dropout_p == 0.0) return {};
  return {
      tile.seed.const_data_ptr<int64_t>(),
      philox::drop_threshold(tile.dropout_p),
      1.0 / (1.0 - tile.dropout_p),
      tile.row0,
      tile.feature0,
      tile.hidden_features};
}

}  // namespace fused_remat::cuda
