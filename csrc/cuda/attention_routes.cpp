// The table. Facts about torch's kernels: aten/src/ATen/native/transformers/cuda (sdp_utils.cpp,
// attention.cu, attention_backward.cu, flash_attn/flash_api.cpp, mem_eff_attention/) and
// aten/src/ATen/native/cudnn/MHA.cpp of torch 2.11 to 2.14.
//
// What we ask for beyond what torch asks of them: the same bits for the same inputs, our dropout
// masks, zeros for rows with nothing to attend to, and no memory that nobody has counted.
#include "attention_routes.h"

#include <ATen/Context.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "../sizes.h"
#include "attention_own.h"
#include "device.h"

namespace fused_remat::cuda {
namespace {

using std::string;

// Words take longer than all the rest, and most calls ask for none.
class Reasons {
 public:
  explicit Reasons(std::vector<string>* words) : words_(words) {}

  template <class... Words>
  void add(bool against, const Words&... words) {
    if (!against) return;
    any_ = true;
    if (words_ != nullptr) words_->push_back(c10::str(words...));
  }
  bool any() const { return any_; }

 private:
  std::vector<string>* words_;
  bool any_ = false;
};

bool is_limited(const Band& band) {
  return band.low > -Band::kUnlimited || band.high < Band::kUnlimited;
}
// No key before the first one that a row may see.
bool only_causal(const Band& band) { return band.low <= -Band::kUnlimited; }

// Some row sees no key: the first one sees none at or before its place, or the last one none after.
bool has_empty_rows(const AttentionFacts& f) {
  return f.band.high < 0 || f.band.low > f.length_k - f.length_q || f.band.low > f.band.high;
}

// What every kernel of torch's lacks.
void against_torch(const AttentionFacts& f, Reasons& reasons) {
  const int64_t smallest =
      std::min({f.batch, f.heads, f.kv_heads, f.length_q, f.length_k, f.width, f.value_width});
  reasons.add(smallest == 0, "there is nothing to compute");
  reasons.add(
      std::max(f.batch, f.heads) > 65535, "more than 65535 samples or heads do not fit a grid");
  reasons.add(
      f.masks,
      "a mask would have to be expanded, and may leave rows with nothing to attend to, which are "
      "zeros here");
  reasons.add(f.extra_keys > 0 && is_limited(f.band), "the band does not concern the extra keys");
  reasons.add(
      smallest > 0 && is_limited(f.band) && has_empty_rows(f),
      "rows with nothing to attend to are zeros here");
  reasons.add(f.dropout_p > 0.0, "its dropout masks come from another generator");
  reasons.add(f.softcap > 0.0, "it has no softcap");
  reasons.add(!f.aligned, "heads or rows of q, k or v do not begin on 16 bytes");
  if (!f.backward) return;
  reasons.add(f.dweights, "the weights have a gradient");
  reasons.add(f.dmasks, "a mask has a gradient");
  reasons.add(
      !f.knows_out,
      "it makes delta from out, which is not at hand, or delta holds the gradient of lse or of the "
      "weights too");
}

void against_piece(Route route, const AttentionFacts& f, Reasons& reasons) {
  if (std::min({f.batch, f.kv_heads, f.length_q, f.length_k}) == 0) return;
  if (piece_of(route, f).batch > 0) return;
  reasons.add(
      true, "it allocates ", temporary_bytes(route, f, {1, 1}),
      " bytes for one sample and key-value head, the workspace has ", f.scratch, " for it");
}

void against_widths(const AttentionFacts& f, int64_t multiple, int64_t most, Reasons& reasons) {
  reasons.add(
      f.width % multiple != 0 || f.value_width % multiple != 0, "head widths must be multiples of ",
      multiple, ", got ", f.width, " and ", f.value_width);
  reasons.add(
      std::max(f.width, f.value_width) > most, "head widths go up to ", most, ", got ", f.width,
      " and ", f.value_width);
}

void against_cudnn(const AttentionFacts& f, Reasons& reasons) {
  const Machine& m = f.machine;
  against_torch(f, reasons);
  reasons.add(!m.cudnn_enabled, "torch.backends.cuda.enable_cudnn_sdp(False) is set");
  // torch itself prefers cuDNN on these alone.
  const bool prefers = m.arch == 90 || m.arch / 10 == 10;
  reasons.add(
      !prefers, "it outruns flash on compute capability 9.0 and 10.x only, this is ",
      m.arch / 10.0);
  reasons.add(m.cudnn == 0, "cuDNN is not there");
  reasons.add(
      m.cudnn != 0 && m.cudnn <= 91500,
      "before cuDNN 9.15.1 lengths that are no multiple of 128 could go wrong, this is version ",
      m.cudnn);
  reasons.add(!is_half(f.dtype), "it takes float16 and bfloat16");
  against_widths(f, 8, 128, reasons);
  reasons.add(f.length_k == 1, "it does not take a single key");
  reasons.add(
      is_limited(f.band) && !(only_causal(f.band) && f.band.high == 0),
      "of bands it has the causal mask that is aligned to the top left");
  // sdpa_backward without set_deterministic_algorithm.
  reasons.add(f.backward, "its backward adds dq in no fixed order");
  reasons.add(m.deterministic, "torch counts it among what is not deterministic");
  against_piece(Route::kCudnn, f, reasons);
}

void against_flash(const AttentionFacts& f, Reasons& reasons) {
  const Machine& m = f.machine;
  against_torch(f, reasons);
  reasons.add(!m.flash_enabled, "torch.backends.cuda.enable_flash_sdp(False) is set");
  reasons.add(
      m.arch < 80 || m.arch > 121, "it runs on compute capability 8.0 to 12.1, this is ",
      m.arch / 10.0);
  reasons.add(!is_half(f.dtype), "it takes float16 and bfloat16");
  reasons.add(
      f.width != f.value_width, "q and v must be equally wide, got ", f.width, " and ",
      f.value_width);
  against_widths(f, 8, 256, reasons);
  // Sides of its window count from the diagonal that ends at the last key, and are not negative.
  const int64_t corner = f.length_k - f.length_q;
  const bool right = f.band.high < Band::kUnlimited;
  reasons.add(
      right && f.band.high < corner, "its causal mask and windows are aligned to the bottom right");
  // A right side of all keys or more is none, and beside a left one none stands for that many.
  reasons.add(
      right ? f.band.high - corner >= f.length_k : !only_causal(f.band) && corner < -1,
      "a window from the top left that spans so many queries is cut off on the right");
  if (f.backward) {
    reasons.add(
        !m.deterministic,
        "its backward adds dq by atomics, in no fixed order, unless "
        "torch.use_deterministic_algorithms(True) is set");
    const bool small = (m.arch > 80 && m.arch < 90) || m.arch / 10 == 12;
    reasons.add(
        small && f.width > 192 && f.width <= 224,
        "its backward lacks heads of 200 to 224 on compute capability 8.6, 8.9 and 12.x");
  }
  against_piece(Route::kFlash, f, reasons);
}

void against_efficient(const AttentionFacts& f, Reasons& reasons) {
  const Machine& m = f.machine;
  against_torch(f, reasons);
  reasons.add(!m.efficient_enabled, "torch.backends.cuda.enable_mem_efficient_sdp(False) is set");
  reasons.add(
      m.arch < 80 || m.arch > 121, "it is trusted on compute capability 8.0 to 12.1, this is ",
      m.arch / 10.0);
  reasons.add(!is_half(f.dtype) && f.dtype != at::kFloat, "it takes float16, bfloat16 and float32");
  against_widths(f, is_half(f.dtype) ? 8 : 4, 256, reasons);
  reasons.add(
      is_limited(f.band) &&
          !(only_causal(f.band) && (f.band.high == 0 || f.band.high == f.length_k - f.length_q)),
      "of bands it has the two causal masks");
  against_piece(Route::kEfficient, f, reasons);
  if (f.backward) {
    // Only with all keys of a head in one block does it add dq in a fixed order.
    constexpr int64_t kFewBlocks = 128;
    const Piece piece = piece_of(Route::kEfficient, f);
    const int64_t blocks = piece.batch * piece.kv_heads;
    reasons.add(
        blocks > 0 && blocks < kFewBlocks,
        "in a fixed order its backward runs one block per head, ", blocks, " of them where ",
        kFewBlocks, " and more keep a GPU busy");
  }
}

void against_own(const AttentionFacts& f, Reasons& reasons) {
  for (const string& reason : own::why_not(f)) reasons.add(true, reason);
}

void against(Route route, const AttentionFacts& f, Reasons& reasons) {
  switch (route) {
    case Route::kCudnn:
      return against_cudnn(f, reasons);
    case Route::kFlash:
      return against_flash(f, reasons);
    case Route::kEfficient:
      return against_efficient(f, reasons);
    case Route::kOwn:
      return against_own(f, reasons);
    case Route::kAten:
      return;
  }
}

bool is_aligned(const at::Tensor& heads) {
  constexpr int64_t kBytes = 16;
  if (reinterpret_cast<uintptr_t>(heads.const_data_ptr()) % kBytes != 0) return false;
  const int64_t elements = kBytes / heads.element_size();
  for (int dim = 0; dim < 3; ++dim)
    if (heads.size(dim) > 1 && heads.stride(dim) % elements != 0) return false;
  return heads.stride(1) <= INT32_MAX && heads.stride(2) <= INT32_MAX;
}

}  // namespace

std::vector<string> why_not(Route route, const AttentionFacts& f) {
  std::vector<string> words;
  Reasons reasons(&words);
  against(route, f, reasons);
  return words;
}

Route route_of(const AttentionFacts& f) {
  for (int row = 0; row < kRoutes - 1; ++row) {
    Reasons reasons(nullptr);
    against(static_cast<Route>(row), f, reasons);
    if (!reasons.any()) return static_cast<Route>(row);
  }
  return Route::kAten;
}

Machine machine_told(int64_t arch, int64_t multiprocessors, int64_t cudnn) {
  const at::Context& torch = at::globalContext();
  Machine m{arch, multiprocessors, cudnn};
  m.cudnn_enabled = torch.userEnabledCuDNNSDP();
  m.flash_enabled = torch.userEnabledFlashSDP();
  m.efficient_enabled = torch.userEnabledMemEfficientSDP();
  m.deterministic = torch.deterministicAlgorithms() && !torch.deterministicAlgorithmsWarnOnly();
  return m;
}

#if defined(FUSED_REMAT_SIMT)
Machine machine_of(const at::Tensor& on_device) {
  return machine_told(OnDevice(on_device).capability(), 132, 91501);
}
#else
namespace {

// Torch 2.11 knows one version of cuDNN, later ones tell that of the headers from that in use.
template <class Hooks>
int64_t cudnn_version(const Hooks& hooks) {
  if (!hooks.compiledWithCuDNN()) return 0;
  if constexpr (requires { hooks.versionRuntimeCuDNN(); })
    return hooks.versionRuntimeCuDNN();
  else
    return hooks.versionCuDNN();
}

}  // namespace

Machine machine_of(const at::Tensor& on_device) {
  static const int64_t cudnn = cudnn_version(at::detail::getCUDAHooks());
  const OnDevice on(on_device);
  return machine_told(
      on.capability(), at::cuda::getCurrentDeviceProperties()->multiProcessorCount, cudnn);
}
#endif

Band simplified(const Band& band, int64_t length_q, int64_t keys) {
  Band made = band;
  if (band.high >= keys - 1) made.high = Band::kUnlimited;
  if (band.low <= 1 - length_q) made.low = -Band::kUnlimited;
  return made;
}

AttentionFacts facts_of(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attending& a) {
  AttentionFacts f;
  f.dtype = q.scalar_type();
  f.batch = q.size(0), f.heads = q.size(1), f.kv_heads = k.size(1);
  f.length_q = q.size(2), f.length_k = k.size(2);
  f.width = q.size(3), f.value_width = v.size(3);
  f.masks = a.attn_mask.has_value() || a.key_mask.has_value();
  f.band = simplified(a.band, f.length_q, f.length_k - a.extra_keys);
  f.extra_keys = a.extra_keys;
  f.dropout_p = a.dropout_p, f.softcap = a.softcap;
  f.aligned = is_aligned(q) && is_aligned(k) && is_aligned(v);
  f.scratch = a.scratch;
  f.machine = machine_of(q);
  return f;
}

}  // namespace fused_remat::cuda
