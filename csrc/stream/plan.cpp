#include "plan.h"

#include "../norm.h"

#include <algorithm>

namespace fused_remat {
namespace {

// A GEMM narrower than this in any direction runs far below its peak rate.
constexpr int64_t kWide = 256;
// Chunk widths are multiples of these where that leaves them at least as wide.
constexpr int64_t kWidthMultiples[] = {256, 8};
// Buffers that a pass carves out of its workspace at the most; each may lose an alignment gap.
constexpr int64_t kMaxBuffers = 16;
// And for adapters beside these.
constexpr int64_t kMaxAdapterBuffers = 8;
// aten builds a dropout mask slab by slab with int64 temporaries of about this many bytes per mask
// element ...
constexpr int64_t kAtenMaskBytes = 80;
// ... for one slab of 1 / kAtenMaskSlabs of the tile (at least one row) at a time.
constexpr int64_t kAtenMaskSlabs = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t size_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

bool is_half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

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

int64_t equal_chunks(int64_t full, int64_t widest) {
  int64_t width = ceil_div(full, ceil_div(full, widest));
  for (const int64_t multiple : kWidthMultiples) {
    const int64_t rounded = ceil_div(width, multiple) * multiple;
    if (width >= multiple && rounded <= widest) return std::min(rounded, full);
  }
  return width;
}

}  // namespace

int64_t TileCost::bytes(int64_t rows, int64_t features) const {
  return fixed + element * rows * features + row * rows + feature * features +
         partial_sum * features * ceil_div(rows, kSumBlockRows) + kMaxBuffers * kWorkspaceAlignment;
}

TilePlan plan_tiles(
    int64_t rows, int64_t features, bool by_features, const TileCost& cost, int64_t budget) {
  const int64_t outer_full = by_features ? features : rows;
  int64_t inner = by_features ? rows : features;
  const auto widest_outer = [&] {
    return capacity(outer_full, budget, [&](int64_t outer) {
      return by_features ? cost.bytes(inner, outer) : cost.bytes(outer, inner);
    });
  };
  int64_t outer = widest_outer();
  while (inner > 1 && (outer == 0 || (outer < std::min(outer_full, kWide) && inner > kWide))) {
    inner = ceil_div(inner, 2);
    outer = widest_outer();
  }
  outer = outer_full == 0 ? 0 : equal_chunks(outer_full, std::max<int64_t>(outer, 1));
  TilePlan plan{by_features, by_features ? inner : outer, by_features ? outer : inner, 0};
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
    const std::string& backend, bool dropout, at::ScalarType x_dtype, at::ScalarType weight_dtype,
    bool norm) {
  const int64_t gemm = size_of(precision.gemm), accumulate = size_of(precision.accumulate);
  const int64_t per_feature = sizes.weight_elements_per_feature();
  const bool by_features = backward_by_features(sizes);
  TileCost cost;
  // hidden, dup, dgate; the ATen composition needs the activation's value beside them.
  cost.element = gemm * ((sizes.gated ? 3 : 2) + (backend == "aten" ? 1 : 0));
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
  // Partial sums of bias gradients: one per block of kSumBlockRows rows; the Triton kernels' blocks
  // are half as long at the least.
  const int64_t partials = backend == "cpp" ? 1 : backend == "triton" ? 2 : 0;
  cost.partial_sum = partials * accumulate * (sizes.gated ? 2 : 1);
  if (norm) cost.row += norm_bytes_per_row(sizes.d_in, precision.accumulate);
  add_mask_temporaries(cost, backend, dropout);
  return cost;
}

std::vector<int64_t> mlp_plan(
    int64_t rows, int64_t d_in, int64_t d_out, int64_t hidden_features, bool gated, bool backward,
    bool dropout, at::ScalarType x_dtype, at::ScalarType weight_dtype, at::ScalarType compute_dtype,
    int64_t workspace, std::string backend, std::string device, bool norm, at::IntArrayRef ranks) {
  TORCH_CHECK_VALUE(ranks.size() == 3, "mlp_plan: ranks must be of up, gate and down");
  const MlpSizes sizes{rows, d_in, d_out, hidden_features, gated, ranks[0], ranks[1], ranks[2]};
  const MlpPrecision precision = mlp_precision(compute_dtype, backend, device == "cpu");
  const bool pack_weights = weight_dtype != precision.gemm;
  const MlpPacking packing{
      norm || x_dtype != precision.gemm || sizes.ranks_in() > 0,
      compute_dtype != precision.gemm || sizes.rank_down > 0, pack_weights || sizes.ranks_in() > 0,
      pack_weights || (backward && sizes.rank_down > 0)};
  const TileCost cost =
      backward
          ? backward_cost(sizes, precision, packing, backend, dropout, x_dtype, weight_dtype, norm)
          : forward_cost(sizes, precision, packing, backend, dropout, norm);
  const TilePlan plan =
      plan_tiles(rows, hidden_features, backward && backward_by_features(sizes), cost, workspace);
  return {plan.by_features, plan.rows, plan.features, plan.bytes};
}

}  // namespace fused_remat
