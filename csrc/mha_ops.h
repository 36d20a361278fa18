// Multi-head attention from x, level 2. Schemas: library_mha.cpp. Maths: docs/math.md.
//
// Dims as attention.h; D* input widths, Do output width. Projections as nn.Linear stores them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <vector>

#include "attention.h"
#include "norm.h"

namespace fused_remat {

enum MhaAdapter { kAdaptQ, kAdaptK, kAdaptV, kAdaptOut, kMhaAdapters };
// The factors of an adapter, both or neither, of any floating dtype: y += scale (x a^T) b^T.
struct AdapterFactors {
  OptionalTensor a, b;  // [r, in], [out, r]
};

// In the order of every argument list, gradient list and mask.
struct MhaOperands {
  at::Tensor query;               // [B, Lq, Dq]
  OptionalTensor key, value;      // [B, Lk, D*]; absent: the (normalised) query, the key
  at::Tensor w_q;                 // [H E, Dq], or with w_k and w_v below it where those are absent
  OptionalTensor w_k, w_v;        // [Hk E, Dk], [Hk Ev, Dv]; each of the three also [heads, E, D]
  OptionalTensor b_q, b_k, b_v;   // likewise, also [heads, E]; packed where b_q has all rows
  at::Tensor w_out;               // [Do, H Ev]
  OptionalTensor b_out;           // [Do]
  OptionalTensor bias_k, bias_v;  // [Hk E], [Hk Ev]: one more key and value for every sample
  OptionalTensor norm_weight, norm_bias;  // [Dq]
  OptionalTensor q_norm, k_norm;          // [E]
  OptionalTensor cos, sin;                // [1 or B, L, R]
  OptionalTensor attn_mask, key_mask;     // as attention
  std::array<AdapterFactors, kMhaAdapters> adapters;
};
enum MhaOperand {
  kQuery,
  kKey,
  kValue,
  kWq,
  kWk,
  kWv,
  kBq,
  kBk,
  kBv,
  kWout,
  kBout,
  kBiasK,
  kBiasV,
  kNormWeight,
  kNormBias,
  kQNorm,
  kKNorm,
  kCos,
  kSin,
  kAttnMask,
  kKeyMask,
  kFirstFactor,  // then a and b of each adapter in turn
  kMhaOperands = kFirstFactor + 2 * kMhaAdapters
};
constexpr int factor_a(int adapter) { return kFirstFactor + 2 * adapter; }
constexpr int factor_b(int adapter) { return factor_a(adapter) + 1; }

// The residuals, which are also the results of forward after y and the weights.
enum MhaResidual { kResidualQ, kResidualK, kResidualV, kResidualOut, kMhaResiduals };

enum MhaWeights : int64_t { kNoWeights = 0, kAveragedWeights = 1, kWeightsPerHead = 2 };

struct MhaOptions {
  int64_t num_heads, num_kv_heads;
  bool add_zero_attn;
  std::string norm;
  double norm_eps, qk_norm_eps;
  bool rotary_interleaved;
  int64_t causal, window_left, window_right;
  double dropout_p, scale, softcap;
  int64_t need_weights;
  std::array<double, kMhaAdapters> adapter_scales;
  std::array<bool, kMhaResiduals> keep;
  int64_t workspace;
  std::string backend;
  at::ScalarType compute_dtype;
};

struct MhaForward {
  at::Tensor y;        // [B, Lq, Do], in memory as the query lies
  at::Tensor weights;  // [B, Lq, Lk + extra] or [B, H, Lq, Lk + extra]; 0 elements where not asked
  // As projected, before norm and rotation: [B, L, heads, width]; out [B, Lq, H, Ev]. 0 elements
  // where not kept.
  std::array<at::Tensor, kMhaResiduals> residuals;
  at::Tensor lse;  // [B, H, Lq]
};

MhaForward mha_fwd(const MhaOperands&, const MhaOptions&, const at::Tensor& seed);

// One gradient per operand; undefined where `wanted` does not ask. Those of parameters in `wide`
// have the dtype of the sums, unrounded.
std::array<at::Tensor, kMhaOperands> mha_bwd(
    const OptionalTensor& dy, const OptionalTensor& dweights, const MhaOperands&, const MhaOptions&,
    const at::Tensor& seed, const std::array<OptionalTensor, kMhaResiduals>& residuals,
    const OptionalTensor& lse, const std::array<bool, kMhaOperands>& wanted,
    const std::array<bool, kMhaOperands>& wide);

// {key-value heads, token rows, bytes} that the passes handle at a time.
std::vector<int64_t> mha_plan(const MhaOperands&, const MhaOptions&);

}  // namespace fused_remat
