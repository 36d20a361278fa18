#include "plan.h"

#include "../cuda/mlp_small.h"
#include "../norm.h"
#include "../sizes.h"

#include <algorithm>

namespace fused_remat {
namespace {

// A GEMM narrower than this in any direction runs far below its peak rate on every device.
constexpr int64_t kWide = 256;
// And on a GPU below this.
constexpr int64_t kWideOnGpu = 1024;
// Chunks of a backward on a GPU: each reads and writes the sums of dx, or those of the weights.
constexpr int64_t kMostChunksOnGpu = 16;
// Chunk widths are multiples of this: rows of 16-bit values then start at 16 bytes, which fast
// loads and the products with epilogues ask for.
constexpr int64_t kWidthMultiple = 8;
// Buffers that a pass carves out of its workspace at the most; each may lose an alignment gap.
constexpr int64_t kMaxBuffers = 16;
// And for adapters beside these.
constexpr int64_t kMaxAdapterBuffers = 8;
// aten builds a dropout mask slab by slab with int64 temporaries of about this many bytes per mask
// element ...
constexpr int64_t kAtenMaskBytes = 80;
// ... for one slab of 1 / kAtenMaskSlabs of the tile (at least one row) at a time.
constexpr int64_t kAtenMaskSlabs = 16;

int64_t size_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// Without such units a half-precision GEMM on a CPU is 6 to 130 times slower than the same one in
// fp32.
bool cpu_multiplies(at::ScalarType half) {
#if defined(__x86_64__)
  return half == at::kBFloat16 ? __builtin_cpu_supports("avx512bf16")
                               : __builtin_cpu_supports("avx512fp16");
#else
  return false;
#endif
}

void add_mask_temporaries(TileCost& cost, const std::string& backend, bool dropout) {
  if (backend != "aten" || !dropout) return;
  cost.element += ceil_div(kAtenMaskBytes, kAtenMaskSlabs);
  cost.feature += kAtenMaskBytes;
}

// Factors in the GEMM dtype, and the bytes of the alignment gaps.
void add_row_factors(TileCost& cost, const MlpSizes& sizes, int64_t gemm) {
  if (!sizes.adapted()) return;
  cost.fixed += gemm * (sizes.ranks_in() * sizes.d_in + sizes.rank_down * sizes.d_out) +
                kMaxAdapterBuffers * kWorkspaceAlignment;
}

// The widest outer chunk that fits next to `inner`; 0 when none does.
template <class Bytes>
int64_t capacity(int64_t outer_full, int64_t budget, const Bytes& bytes) {
  int64_t fits = 0, too_wide = outer_full + 1;
  while (too_wide - fits > 1) {
    const int64_t middle = fits + (too_wide - fits) / 2;
    (bytes(middle) <= budget ? fits : too_wide) = middle;
  }
  return fits;
}

// The width of chunks that share `full` about equally, at most `widest`: a multiple of kWide where
// that is had by rounding up, else of kWidthMultiple, unless there is one chunk or none so wide.
int64_t equal_chunks(int64_t full, int64_t widest) {
  const auto share = [&](int64_t at_most) { return ceil_div(full, ceil_div(full, at_most)); };
  const int64_t equal = share(widest), wide = round_up(equal, kWide);
  if (equal == full) return full;
  if (equal >= kWide && wide <= widest) return wide;
  const int64_t most = widest / kWidthMultiple * kWidthMultiple;
  return most == 0 ? equal : round_up(share(most), kWidthMultiple);
}

// Half of what the inner loop takes at a time; as features, a multiple of kWidthMultiple where
// that is less.
int64_t halved(int64_t inner, bool features) {
  const int64_t half = ceil_div(inner, 2);
  return features && inner > kWidthMultiple ? round_up(half, kWidthMultiple) : half;
}

// Whether the epilogues of cuBLASLt may make stage 1 of a tile (cuda/mlp_route.h), as far as the
// layer tells.
bool may_use_library_epilogues(
    const MlpSizes& sizes, const MlpPrecision& precision, const MlpStage1& stage1) {
  if (stage1.backend != "cuda" || stage1.activation != "gelu_tanh" || stage1.dropout) return false;
  if (sizes.gated || precision.gemm == at::kDouble) return false;
  // Chunks of features may lie past those that were kept; chunks of tokens hold some of them.
  return stage1.kept == 0 || (backward_by_features(sizes) && stage1.kept < sizes.hidden_features);
}

// Stage 1 of a backward tile: what it needs beside hidden, dup and dgate.
TileCost stage1_cost(
    const MlpSizes& sizes, const MlpPrecision& precision, const MlpStage1& stage1) {
  const std::string& backend = stage1.backend;
  TileCost cost;
  const int64_t gemm = size_of(precision.gemm);
  // The ATen composition keeps the activation's value; cuBLASLt's epilogues, the pre-activation.
  if (backend == "aten" || may_use_library_epilogues(sizes, precision, stage1)) cost.element = gemm;
  // Partial sums of bias gradients: one per block of kSumBlockRows rows; the blocks of the Triton
  // and CUDA kernels are half as long at the least.
  const int64_t partials = backend == "cpp" ? 1 : backend == "triton" || backend == "cuda" ? 2 : 0;
  cost.partial_sum = partials * size_of(precision.accumulate) * (sizes.gated ? 2 : 1);
  return cost;
}

}  // namespace

int64_t TileCost::bytes(int64_t rows, int64_t features) const {
  return fixed + element * rows * features + row * rows + feature * features +
         partial_sum * features * ceil_div(rows, kSumBlockRows) + kMaxBuffers * kWorkspaceAlignment;
}

TileGoal tile_goal(bool on_cpu, bool backward) {
  if (on_cpu) return {};
  return backward ? TileGoal{kWideOnGpu, kMostChunksOnGpu} : TileGoal{kWideOnGpu};
}

TilePlan plan_tiles(
    int64_t rows, int64_t features, bool by_features, const TileGoal& goal, const TileCost& cost,
    int64_t budget) {
  const int64_t full = by_features ? features : rows;
  int64_t inner = by_features ? rows : features;
  const auto widest_outer = [&] {
    return capacity(full, budget, [&](int64_t outer) {
      return by_features ? cost.bytes(inner, outer) : cost.bytes(outer, inner);
    });
  };
  int64_t widest = widest_outer();
  const auto width = [&] {
    return full == 0 ? 0 : equal_chunks(full, std::max<int64_t>(widest, 1));
  };
  const auto halve_inner = [&] {
    inner = halved(inner, !by_features);
    widest = widest_outer();
  };
  const auto misses_goal = [&] {
    return full > 0 &&
           (width() < std::min(full, goal.width) || ceil_div(full, width()) > goal.chunks);
  };
  // Once the outer direction is as wide as the inner, the sums over the inner one cost more traffic
  // than those over the outer one save.
  while (inner >= 2 * std::max(widest, goal.width) && misses_goal()) halve_inner();
  while (inner > 1 && (widest == 0 || (widest < std::min(full, kWide) && inner > kWide)))
    halve_inner();
  TilePlan plan{by_features, by_features ? inner : width(), by_features ? width() : inner, 0};
  plan.bytes = cost.bytes(plan.rows, plan.features);
  return plan;
}

MlpPrecision mlp_precision(at::ScalarType compute, const std::string& backend, bool on_cpu) {
  // `cpp` alone upcasts: `aten` stays the plain composition in the dtype asked for.
  const bool upcast = on_cpu && backend == "cpp" && is_half(compute) && !cpu_multiplies(compute);
  return {
      compute, upcast ? at::kFloat : compute, compute == at::kDouble ? at::kDouble : at::kFloat};
}

bool backward_by_features(const MlpSizes& sizes) {
  return sizes.rows < (sizes.gated ? 3 : 2) * sizes.hidden_features;
}

TileCost forward_cost(
    const MlpSizes& sizes, const MlpPrecision& precision, const MlpPacking& packing,
    const std::string& backend, bool dropout, bool norm) {
  const int64_t gemm = size_of(precision.gemm), accumulate = size_of(precision.accumulate);
  TileCost cost;
  cost.element = gemm * (sizes.gated ? 2 : 1);
  if (packing.x) cost.row += sizes.x_stride() * gemm;
  if (packing.weights_in) cost.feature += sizes.x_stride() * (sizes.gated ? 2 : 1) * gemm;
  if (packing.w_down) cost.feature += sizes.d_out * gemm;
  cost.feature += sizes.rank_down * gemm;
  if (precision.compute != precision.accumulate) cost.row += sizes.d_out * accumulate;
  cost.row += sizes.rank_down * accumulate;
  if (precision.gemm != precision.accumulate)
    cost.row += (std::max(sizes.d_out, sizes.rank_down) + sizes.rank_down) * gemm;
  add_row_factors(cost, sizes, gemm);
  if (norm) cost.row += norm_bytes_per_row(sizes.d_in, precision.accumulate);
  add_mask_temporaries(cost, backend, dropout);
  return cost;
}

TileCost backward_cost(
    const MlpSizes& sizes, const MlpPrecision& precision, const MlpPacking& packing,
    const MlpStage1& stage1, at::ScalarType x_dtype, at::ScalarType weight_dtype, bool norm) {
  const int64_t gemm = size_of(precision.gemm), accumulate = size_of(precision.accumulate);
  const int64_t per_feature = sizes.weight_elements_per_feature();
  const bool by_features = backward_by_features(sizes);
  TileCost cost = stage1_cost(sizes, precision, stage1);
  cost.element += gemm * (sizes.gated ? 3 : 2);  // hidden, dup, dgate
  if (packing.x) cost.row += sizes.x_stride() * gemm;
  if (packing.dy) cost.row += sizes.dy_stride() * gemm;
  if (packing.weights_in) cost.feature += sizes.x_stride() * (sizes.gated ? 2 : 1) * gemm;
  if (packing.w_down) cost.feature += (sizes.d_out + sizes.rank_down) * gemm;
  if (!by_features) cost.row += (sizes.ranks_in() + sizes.rank_down) * accumulate;
  if (!by_features && x_dtype != precision.accumulate) cost.row += sizes.d_in * accumulate;
  if (by_features && weight_dtype != precision.accumulate) cost.feature += per_feature * accumulate;
  if (precision.gemm != precision.accumulate) {
    const int64_t rank = sizes.widest_rank();
    cost.row += (std::max(sizes.d_in, rank) + rank) * gemm;
    cost.feature += std::max({sizes.d_in, sizes.d_out, rank}) * gemm;
    cost.fixed += std::max(sizes.d_in, sizes.d_out) * rank * gemm;
  }
  add_row_factors(cost, sizes, gemm);
  if (norm) cost.row += norm_bytes_per_row(sizes.d_in, precision.accumulate);
  add_mask_temporaries(cost, stage1.backend, stage1.dropout);
  return cost;
}

int64_t backward_scratch(
    const MlpSizes& sizes, const MlpPrecision& precision, const MlpStage1& stage1, int64_t rows,
    int64_t features) {
  // The other backends allocate their partial sums themselves.
  if (stage1.backend != "aten" && stage1.backend != "cuda") return 0;
  const TileCost cost = stage1_cost(sizes, precision, stage1);
  const int64_t element = round_up(cost.element * rows * features, kWorkspaceAlignment);
  return element + cost.partial_sum * features * ceil_div(rows, kSumBlockRows);
}

std::vector<int64_t> mlp_plan(
    int64_t rows, int64_t d_in, int64_t d_out, int64_t hidden_features, bool gated, bool backward,
    bool dropout, at::ScalarType x_dtype, at::ScalarType weight_dtype, at::ScalarType compute_dtype,
    int64_t workspace, std::string backend, std::string device, bool norm, at::IntArrayRef ranks,
    std::string activation, int64_t kept) {
  TORCH_CHECK_VALUE(ranks.size() == 3, "mlp_plan: ranks must be of up, gate and down");
  const MlpSizes sizes{rows, d_in, d_out, hidden_features, gated, ranks[0], ranks[1], ranks[2]};
  const mlp_small::Call narrow{
      rows,     d_in, d_out,          hidden_features, compute_dtype, {x_dtype, weight_dtype},
      kept > 0, norm, sizes.adapted()};
  if (backend == "cuda" && mlp_small::why_not(narrow).empty()) {
    const auto ranges =
        mlp_small::plan_ranges(rows, d_in, d_out, hidden_features, gated, workspace);
    return {
        kOneKernel, backward ? ranges.rows : rows, hidden_features, backward ? ranges.bytes : 0};
  }
  const bool on_cpu = device == "cpu";
  const MlpPrecision precision = mlp_precision(compute_dtype, backend, on_cpu);
  const bool pack_weights = weight_dtype != precision.gemm;
  const MlpPacking packing{
      norm || x_dtype != precision.gemm || sizes.ranks_in() > 0,
      compute_dtype != precision.gemm || sizes.rank_down > 0, pack_weights || sizes.ranks_in() > 0,
      pack_weights || (backward && sizes.rank_down > 0)};
  const TileCost cost = backward
                            ? backward_cost(
                                  sizes, precision, packing, {backend, activation, dropout, kept},
                                  x_dtype, weight_dtype, norm)
                            : forward_cost(sizes, precision, packing, backend, dropout, norm);
  const TilePlan plan = plan_tiles(
      rows, hidden_features, backward && backward_by_features(sizes), tile_goal(on_cpu, backward),
      cost, workspace);
  return {plan.by_features, plan.rows, plan.features, plan.bytes};
}

}  // namespace fused_remat
