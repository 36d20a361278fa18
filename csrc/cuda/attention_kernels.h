// Attention on a head group in CUDA C++: what its kernels are told, and their launchers.
//
// Dims, masks and bands as in ../attention.h. Strides are in elements.
#pragma once

#include "platform.h"

namespace fused_remat::cuda {

// A [B, heads, L, width] operand with a dense last dim. `vectors`: rows start and end on 16 bytes.
template <class Data>
struct AttentionHeads {
  Data* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
  bool vectors = false;
};

// [B, H, Lq] numbers with dense rows, in the accumulation dtype.
template <class Data>
struct AttentionRows {
  Data* data = nullptr;
  int64_t batch = 0, head = 0;
};

// Floating masks are in the dtype of q, or in the accumulation dtype.
enum class MaskKind { kNone, kBool, kOperand, kAccumulate };

// What has a number per (batch, head, query, key): strides of 0 where it does not vary. Only masks
// say their kind, the others are in the accumulation dtype.
template <class Data>
struct AttentionGrid {
  Data* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 0;
  MaskKind kind = MaskKind::kNone;
};

// Positions are 32-bit numbers: lengths stay below this, and bands are cut off here.
constexpr int kFarthest = 1 << 30;
constexpr int64_t kMaxLength = int64_t{1} << 29;

// Everything that turns q, k and v into probabilities.
struct AttentionCall {
  AttentionHeads<const void> q, k, v;
  AttentionGrid<const void> masks[2];
  const int64_t* seed = nullptr;  // on the device; null without dropout
  uint64_t threshold = 0;         // of philox.h
  double keep_scale = 1.0;        // 1 / (1 - dropout_p)
  double scale = 1.0, softcap = 0.0;
  int64_t head0 = 0, num_heads = 0;
  int batch = 0, heads = 0, group = 1;  // `group` query heads share a key-value head
  int length_q = 0, length_k = 0, masked_keys = 0;
  int width = 0, value_width = 0;
  int low = -kFarthest, high = kFarthest;

  bool has_mask() const {
    return masks[0].kind != MaskKind::kNone || masks[1].kind != MaskKind::kNone;
  }
  bool plain() const { return !has_mask() && seed == nullptr && softcap == 0.0; }
};

struct AttentionFwdArgs {
  AttentionCall call;
  AttentionHeads<void> out;
  AttentionRows<void> lse;
};

// Without `dout`: corrections alone.
struct AttentionDeltaArgs {
  AttentionCall call;
  AttentionRows<const void> lse;
  AttentionHeads<const void> dout, out;
  AttentionGrid<const void> dweights;  // data may be null
  double factor = 1.0;
  AttentionHeads<void> rebuilt;  // data is null where `out` is known
  AttentionRows<void> delta, correction;
};

// What all of backward reads.
struct AttentionBwdArgs {
  AttentionCall call;
  AttentionRows<const void> lse, correction, delta;
  AttentionHeads<const void> dout;
  AttentionGrid<const void> dweights;  // data may be null
  double factor = 1.0;
};

struct AttentionDqArgs {
  AttentionBwdArgs bwd;
  AttentionHeads<void> dq;
};

struct AttentionDkDvArgs {
  AttentionBwdArgs bwd;
  AttentionHeads<void> dk, dv;  // data is null where not wanted
};

// dmask [batches, heads, rows, columns], each that of the scores or 1, += the gradient of the
// masked scores summed over what it lacks.
struct AttentionDmaskArgs {
  AttentionBwdArgs bwd;
  AttentionGrid<void> dmask;
  int batches = 1, heads = 1;
  bool sum_queries = false, sum_keys = false;
};

// weights [B, owners, Lq, Lk] += factor * dropped probabilities; `owners` is 1 or all heads.
struct AttentionWeightsArgs {
  AttentionCall call;
  AttentionRows<const void> lse, correction;
  AttentionGrid<void> weights;
  int owners = 1;
  double factor = 1.0;
};

// The widest heads that these kernels take.
constexpr int64_t attention_max_width(Dtype dtype) { return dtype == Dtype::kDouble ? 128 : 256; }

void launch_attention_fwd(const AttentionFwdArgs&, Dtype, Stream);
void launch_attention_delta(const AttentionDeltaArgs&, Dtype, Stream);
void launch_attention_dq(const AttentionDqArgs&, Dtype, Stream);
void launch_attention_dkdv(const AttentionDkDvArgs&, Dtype, Stream);
void launch_attention_dmask(const AttentionDmaskArgs&, Dtype, Stream);
void launch_attention_weights(const AttentionWeightsArgs&, Dtype, Stream);

}  // namespace fused_remat::cuda
