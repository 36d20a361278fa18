// Level 3 in C++ for the CPU: library GEMMs, then one elementwise pass per tile in parallel blocks.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../activations.h"
#include "../mlp.h"
#include "../stream/plan.h"
#include "tile.h"

namespace fused_remat::cpu {

using at::Tensor;

namespace {

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
#if defined(__x86_64__)
    // Torch's own choice, which the user may lower (ATEN_CPU_CAPABILITY).
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") return kernels_avx512();
    if (capability == "AVX2") return kernels_avx2();
#endif
    return kernels_default();
  }();
  return chosen;
}

int activation_index(const std::string& name) {
  static_assert(activations::kCount == kActivations);
  const int index = activations::index_of(name);
  TORCH_CHECK_VALUE(index >= 0, "activation: no C++ kernel for ", name);
  return index;
}

}  // namespace

Storage storage_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return Storage::kDouble;
    case at::kFloat:
      return Storage::kFloat;
    case at::kBFloat16:
      return Storage::kBFloat16;
    case at::kHalf:
      return Storage::kHalf;
    default:
      TORCH_CHECK_TYPE(
          false, "cpp kernels take float64, float32, bfloat16 or float16, got ", dtype);
  }
}

namespace {

// The dtype that a tile is computed and summed in.
at::ScalarType wide(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

Matrix matrix_of(const Tensor& t) {
  if (t.numel() == 0) return {};
  TORCH_CHECK(
      t.dim() == 2 && (t.stride(1) == 1 || t.size(1) == 1),
      "cpp kernels take matrices with dense rows");
  return {t.data_ptr(), t.stride(0), t.size(1)};
}

const void* bias_data(const OptionalTensor& bias, TileArgs& args) {
  if (!bias || bias->numel() == 0) return nullptr;
  TORCH_CHECK(bias->is_contiguous(), "cpp kernels take contiguous biases");
  args.bias_storage = storage_of(bias->scalar_type());
  return bias->data_ptr();
}

TileArgs tile_args(
    const MlpLayer& layer, const MlpTile& tile, const MlpResiduals& residuals, const Tensor& hidden,
    const Tensor& gate) {
  TileArgs args{};
  args.storage = storage_of(hidden.scalar_type());
  args.compute = storage_of(residuals.up.scalar_type());
  TORCH_CHECK_TYPE(
      (args.storage == Storage::kDouble) == (args.compute == Storage::kDouble),
      "cpp kernels compute float64 in float64 only");
  args.hidden = matrix_of(hidden);
  if (layer.gated()) args.gate = matrix_of(gate);
  args.kept_up = matrix_of(residuals.up);
  args.kept_gate = matrix_of(residuals.gate);
  TORCH_CHECK_TYPE(
      !layer.b_up || !layer.b_gate || layer.b_up->scalar_type() == layer.b_gate->scalar_type(),
      "cpp kernels take b_up and b_gate of one dtype");
  args.b_up = bias_data(layer.b_up, args);
  args.b_gate = bias_data(layer.b_gate, args);
  args.dropout = tile.dropout_p > 0.0;
  args.drop_p = tile.dropout_p;
  args.seed = args.dropout ? static_cast<uint64_t>(*tile.seed.const_data_ptr<int64_t>()) : 0;
  args.row0 = tile.row0;
  args.feature0 = tile.feature0;
  args.hidden_features = tile.hidden_features;
  return args;
}

// body(block, index of its row block) over all blocks of [rows, cols], in parallel.
template <class Body>
// A block is kSumBlockRows by kBlockCols elements: work for a thread, and fixed, so that sums are
// too.
void parallel_blocks(int64_t rows, int64_t cols, const Body& body) {
  const int64_t row_blocks = (rows + kSumBlockRows - 1) / kSumBlockRows;
  const int64_t col_blocks = (cols + kBlockCols - 1) / kBlockCols;
  at::parallel_for(0, row_blocks * col_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t r = task / col_blocks, row0 = r * kSumBlockRows,
                    col0 = task % col_blocks * kBlockCols;
      body(
          Block{
              row0, std::min(rows, row0 + kSumBlockRows), col0, std::min(cols, col0 + kBlockCols)},
          r);
    }
  });
}

// One row of partial sums per row block; `fold` adds them up pairwise, which rounds with the
// logarithm of their number, and then to the result.
class PartialSums {
 public:
  PartialSums(const Tensor& out, int64_t rows) : out_(out) {
    if (out.numel() > 0)
      partial_ =
          at::zeros({(rows + kSumBlockRows - 1) / kSumBlockRows, out.size(0)}, out.options());
  }
  void* at_block(const Block& block, int64_t row_block) const {
    if (!partial_.defined()) return nullptr;
    return static_cast<char*>(partial_.data_ptr()) +
           (row_block * partial_.size(1) + block.col0) * partial_.element_size();
  }
  void fold() {
    if (!partial_.defined()) return;
    const int64_t n = partial_.size(0);
    for (int64_t step = 1; step < n; step *= 2)
      for (int64_t r = 0; r + step < n; r += 2 * step)
        partial_.select(0, r).add_(partial_.select(0, r + step));
    if (n > 0) out_.add_(partial_.select(0, 0));
  }

 private:
  Tensor out_, partial_;
};

void check_sums(const Tensor& sums, const Tensor& values) {
  TORCH_CHECK_TYPE(
      sums.scalar_type() == wide(values.scalar_type()), "sums of ", values.scalar_type(),
      " must be ", wide(values.scalar_type()), ", got ", sums.scalar_type());
}

// product <- x w^T for the features that are not kept.
void multiply_rebuilt(const Tensor& x, const Tensor& w, int64_t n_kept, const Tensor& product) {
  const int64_t n = w.size(0) - n_kept;
  if (n == 0) return;
  Tensor out = product.narrow(1, n_kept, n);
  at::mm_out(out, x, w.narrow(0, n_kept, n).t());
}

}  // namespace

void mlp_fwd_chunk(
    const Tensor& x, const MlpLayer& layer, const MlpTile& tile, const MlpResiduals& residuals,
    const MlpBuffers& buffers) {
  const TileArgs args = tile_args(layer, tile, residuals, buffers.hidden, buffers.scratch);
  const ForwardBlock kernel =
      kernels().forward[activation_index(tile.activation)][args.storage == Storage::kDouble];
  multiply_rebuilt(x, layer.w_up, 0, buffers.hidden);
  if (layer.gated()) multiply_rebuilt(x, *layer.w_gate, 0, buffers.scratch);
  parallel_blocks(
      x.size(0), layer.w_up.size(0), [&](const Block& block, int64_t) { kernel(args, block); });
}

void mlp_bwd_chunk(
    const Tensor& x, const Tensor& dy, const MlpLayer& layer, const MlpTile& tile,
    const MlpResiduals& residuals, const MlpBuffers& buffers, const Tensor& db_up,
    const Tensor& db_gate) {
  TileArgs args = tile_args(layer, tile, residuals, buffers.hidden, buffers.dgate);
  args.dup = matrix_of(buffers.dup);
  for (const Tensor& sums : {db_up, db_gate})
    if (sums.numel() > 0) check_sums(sums, buffers.hidden);
  const BackwardBlock kernel =
      kernels().backward[activation_index(tile.activation)][args.storage == Storage::kDouble];
  multiply_rebuilt(x, layer.w_up, residuals.up.size(1), buffers.hidden);
  if (layer.gated()) multiply_rebuilt(x, *layer.w_gate, residuals.gate.size(1), buffers.dgate);
  if (buffers.dup.numel() > 0) {
    Tensor dhidden = buffers.dup;
    at::mm_out(dhidden, dy, layer.w_down);
  }
  PartialSums up_sums(db_up, x.size(0)), gate_sums(db_gate, x.size(0));
  parallel_blocks(x.size(0), layer.w_up.size(0), [&](const Block& block, int64_t r) {
    kernel(args, block, up_sums.at_block(block, r), gate_sums.at_block(block, r));
  });
  up_sums.fold();
  gate_sums.fold();
}

void column_sums(const Tensor& a, const Tensor& out) {
  check_sums(out, a);
  const Matrix matrix = matrix_of(a);
  const Storage storage = storage_of(a.scalar_type());
  PartialSums sums(out, a.size(0));
  parallel_blocks(a.size(0), a.size(1), [&](const Block& block, int64_t r) {
    kernels().column_sums[storage == Storage::kDouble](
        matrix, storage, block, sums.at_block(block, r));
  });
  sums.fold();
}

}  // namespace fused_remat::cpu
