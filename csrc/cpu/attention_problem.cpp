#include "attention_problem.h"

#include <ATen/Version.h>

namespace fused_remat::cpu {

using at::Tensor;

namespace {

// Tiles that keep a thread's scores in its second-level cache while the products stay efficient.
constexpr int64_t kTileQueries = 128, kTileKeys = kWidestTile;

}  // namespace

const AttentionKernels& attention_kernels() {
  static const AttentionKernels& chosen = []() -> const AttentionKernels& {
#if defined(__x86_64__)
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") return attention_kernels_avx512();
    if (capability == "AVX2") return attention_kernels_avx2();
#endif
    return attention_kernels_default();
  }();
  return chosen;
}

HeadsView::HeadsView(const Tensor& t)
    : data(static_cast<char*>(t.data_ptr())),
      stride_b(t.stride(0)),
      stride_h(t.stride(1)),
      stride_l(t.stride(2)),
      width(t.size(3)),
      size(static_cast<int64_t>(t.element_size())) {
  TORCH_CHECK(
      width <= 1 || t.stride(3) == 1, "cpp kernels take attention operands with a dense last dim");
}

Problem::Problem(const Tensor& q, const Tensor& k, int64_t value_width, const Attending& attending)
    : storage(storage_of(q.scalar_type())),
      wide(storage == Storage::kDouble),
      batch(q.size(0)),
      heads(q.size(1)),
      kv_heads(k.size(1)),
      length_q(q.size(2)),
      length_k(k.size(2)),
      width(q.size(3)),
      value_width(value_width),
      q(q),
      k(k),
      masks_{mask_strides(attending.attn_mask), mask_strides(attending.key_mask)},
      band_(attending.band),
      masked_keys_(length_k - attending.extra_keys),
      dropout_(attending.dropout_p > 0.0),
      drop_p_(attending.dropout_p),
      scale_(attending.scale),
      softcap_(attending.softcap),
      head0_(attending.head0),
      num_heads_(attending.num_heads),
      scratch_bytes_(attending.scratch) {
  TORCH_CHECK_VALUE(
      q.dim() == 4 && k.dim() == 4 && kv_heads > 0 && heads % kv_heads == 0 && k.size(0) == batch &&
          k.size(3) == width && k.scalar_type() == q.scalar_type() && masked_keys_ >= 0 &&
          (!dropout_ || attending.seed.numel() == 1),
      "cpp attention: q ", q.sizes(), " and k ", k.sizes(), " do not fit together");
  check_mask(attending.attn_mask);
  check_mask(attending.key_mask);
  if (dropout_) seed_ = static_cast<uint64_t>(*attending.seed.const_data_ptr<int64_t>());
  choose_tiles();
}

void Problem::check_mask(const OptionalTensor& mask) const {
  const int64_t full[] = {batch, heads, length_q, masked_keys_};
  for (int64_t dim = 0; mask && dim < 4; ++dim)
    TORCH_CHECK_VALUE(
        mask->dim() == 4 && (mask->size(dim) == 1 || mask->size(dim) == full[dim]),
        "cpp attention: a mask must broadcast to ", at::IntArrayRef(full, 4), ", got ",
        mask->sizes());
}

void Problem::check(const Tensor& t, bool of_keys, int64_t columns) const {
  TORCH_CHECK_VALUE(
      t.dim() == 4 && t.size(0) == batch && t.size(1) == (of_keys ? kv_heads : heads) &&
          t.size(2) == (of_keys ? length_k : length_q) && t.size(3) == columns,
      "cpp attention: an operand ", t.sizes(), " does not fit q and k");
}

void Problem::check_rows(const Tensor& t) const {
  TORCH_CHECK_VALUE(
      t.dim() == 3 && t.size(0) == batch && t.size(1) == heads && t.size(2) == length_q &&
          t.scalar_type() == (wide ? at::kDouble : at::kFloat) &&
          (length_q <= 1 || t.stride(2) == 1),
      "cpp attention: lse and delta are dense rows of [B, H, Lq] in the accumulation dtype, got ",
      t.sizes(), " of ", t.scalar_type());
}

int64_t Problem::scratch_numbers() const {
  return 2 * tile_queries * score_stride() + aligned(tile_queries * width) +
         2 * aligned(tile_queries * value_width) + aligned(tile_keys * width) +
         aligned(tile_keys * value_width) + 2 * aligned(tile_queries);
}

// By the budget and the shape alone: sums must not depend on the number of threads.
void Problem::choose_tiles() {
  const int64_t number = wide ? 8 : 4;
  tile_queries = std::clamp<int64_t>(length_q, 1, kTileQueries);
  tile_keys = std::clamp<int64_t>(length_k, 1, kTileKeys);
  while (4 * number * scratch_numbers() > 3 * scratch_bytes_ &&
         (tile_queries > 1 || tile_keys > 1)) {
    int64_t& longer = tile_keys > tile_queries ? tile_keys : tile_queries;
    longer = (longer + 1) / 2;
  }
}

Problem::MaskStrides Problem::mask_strides(const OptionalTensor& mask) {
  MaskStrides strides;
  if (!mask) return strides;
  const auto stride = [&](int64_t dim) { return mask->size(dim) == 1 ? 0 : mask->stride(dim); };
  strides.view.data = mask->const_data_ptr();
  strides.view.is_bool = mask->scalar_type() == at::kBool;
  if (!strides.view.is_bool) strides.view.storage = storage_of(mask->scalar_type());
  strides.view.stride_q = stride(2);
  strides.view.stride_k = stride(3);
  strides.stride_b = stride(0);
  strides.stride_h = stride(1);
  strides.size = static_cast<int64_t>(mask->element_size());
  return strides;
}

ScoreTile Problem::tile(
    int64_t b, int64_t h, int64_t i0, int64_t rows, int64_t j0, int64_t cols, void* scores) const {
  ScoreTile tile{};
  tile.scores = scores;
  tile.stride = score_stride();
  tile.rows = rows;
  tile.cols = cols;
  tile.i0 = i0;
  tile.j0 = j0;
  tile.scale = scale_;
  tile.softcap = softcap_;
  tile.low = band_.low;
  tile.high = band_.high;
  tile.masked_keys = masked_keys_;
  for (size_t m = 0; m < masks_.size(); ++m) {
    tile.masks[m] = masks_[m].view;
    if (tile.masks[m].data != nullptr)
      tile.masks[m].data = static_cast<const char*>(tile.masks[m].data) +
                           (b * masks_[m].stride_b + h * masks_[m].stride_h) * masks_[m].size;
  }
  tile.dropout = dropout_;
  tile.drop_p = drop_p_;
  tile.seed = seed_;
  tile.index0 = static_cast<uint64_t>((b * num_heads_ + head0_ + h) * length_q * length_k);
  tile.row_elements = length_k;
  return tile;
}

}  // namespace fused_remat::cpu
