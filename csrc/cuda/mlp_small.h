// Which MLPs are narrow enough for one kernel each way, and how that kernel cuts its work. Pure
// functions of shapes, dtypes and options: forward and backward, every rank and every replay decide
// alike. Shared by the streaming level, the host glue and the launchers; knows neither ATen nor
// CUDA.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../sizes.h"

namespace fused_remat::mlp_small {

constexpr int64_t kWidest = 128;        // of D and D_out
constexpr int64_t kMostFeatures = 512;  // of F

// What the choice depends on.
struct Call {
  int64_t rows, d_in, d_out, hidden_features;
  at::ScalarType compute;
  std::vector<at::ScalarType> operands;  // dtypes of x and of the parameters
  bool keeps;                            // pre-activations for backward
  bool norm;                             // folded into the layer
  bool adapted;                          // low-rank adapters
};

// Every reason why the call takes the ordinary, streamed path; empty where the one kernel runs.
inline std::vector<std::string> why_not(const Call& call) {
  std::vector<std::string> reasons;
  const auto number = [](int64_t n) { return std::to_string(n); };
  if (call.rows == 0 || call.d_in == 0 || call.d_out == 0 || call.hidden_features == 0)
    reasons.push_back("a dimension is 0");
  if (std::max(call.d_in, call.d_out) > kWidest)
    reasons.push_back(
        "D and D_out are up to " + number(kWidest) + ", got " + number(call.d_in) + " and " +
        number(call.d_out));
  if (call.hidden_features > kMostFeatures)
    reasons.push_back(
        "F is up to " + number(kMostFeatures) + ", got " + number(call.hidden_features));
  if (!is_half(call.compute))
    reasons.push_back(
        std::string("the compute dtype is Half or BFloat16, got ") + c10::toString(call.compute));
  for (const at::ScalarType dtype : call.operands)
    if (!is_half(dtype) && dtype != at::kFloat) {
      reasons.push_back(
          std::string("operands are Half, BFloat16 or Float, got ") + c10::toString(dtype));
      break;
    }
  if (call.keeps) reasons.push_back("pre-activations are kept");
  if (call.norm) reasons.push_back("a norm is folded in");
  if (call.adapted) reasons.push_back("a weight has an adapter");
  return reasons;
}

// Threads of a block, and what a block takes at a time.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileRows = 16 * kWarps;  // token rows of a forward or dx block
constexpr int kSliceFeatures = 64;      // hidden features of a dW block
constexpr int kStepRows = 32;           // token rows of a dW block's step
constexpr int kBiasSums = 5;            // per thread: db_up and db_gate of two features, db_down
constexpr int64_t kSharedBytes = 99 * 1024;  // what every architecture since 8.0 has, 8.6 included
constexpr int64_t kCounterAlignment = 64;    // bytes

// The widths that kernels are compiled for; narrower layers are padded with zeros.
constexpr int64_t bucket_of(int64_t d_in, int64_t d_out) {
  const int64_t width = std::max(d_in, d_out);
  return width <= 32 ? 32 : width <= 64 ? 64 : 128;
}

// fp32 values that a thread of a dW block sums: half of the columns of each weight gradient for 16
// features, in fragments of 8 columns by 4 values, and biases.
constexpr int64_t sums_per_thread(int64_t bucket, bool gated) {
  return bucket / 16 * 4 * (gated ? 3 : 2) + kBiasSums;
}

// How the dW blocks share M: `ranges` token ranges of `rows` each, whose partial sums take `bytes`
// of the workspace (0 where there is one range).
struct Ranges {
  int64_t rows;
  int64_t ranges;
  int64_t slices;  // of kSliceFeatures hidden features
  int64_t bytes;

  int64_t counter_bytes() const {
    return round_up(slices * int64_t(sizeof(uint32_t)), kCounterAlignment);
  }
  int64_t partial_bytes() const { return bytes - counter_bytes(); }
};

// Neither from the device's free memory nor from its number of multiprocessors.
inline Ranges plan_ranges(
    int64_t rows, int64_t d_in, int64_t d_out, int64_t hidden_features, bool gated,
    int64_t workspace) {
  // A range shorter than this costs more partial sums than it saves time; the last block to arrive
  // adds up at most so many.
  constexpr int64_t kFewestRows = 1024, kMostRanges = 64;
  const int64_t slices = ceil_div(hidden_features, kSliceFeatures);
  const int64_t partial =
      slices * sums_per_thread(bucket_of(d_in, d_out), gated) * kThreads * int64_t(sizeof(float));
  Ranges plan{rows, 1, slices, 0};
  const int64_t affordable = std::max<int64_t>(0, workspace - plan.counter_bytes()) / partial;
  const int64_t wanted = std::min({ceil_div(rows, kFewestRows), kMostRanges, affordable});
  if (wanted < 2) return plan;
  plan.rows = round_up(ceil_div(rows, wanted), kStepRows);
  plan.ranges = ceil_div(rows, plan.rows);
  if (plan.ranges > 1) plan.bytes = plan.ranges * partial + plan.counter_bytes();
  return plan;
}

}  // namespace fused_remat::mlp_small
