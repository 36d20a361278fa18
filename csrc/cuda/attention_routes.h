// Which kernels run attention on a head group on a GPU: the rows of one table, the reasons of each
// against a call, and what it allocates beside our buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <vector>

#include "../attention.h"

namespace fused_remat::cuda {

// In order of preference. The last one is never refused.
enum class Route { kCudnn, kFlash, kEfficient, kOwn, kAten };
constexpr int kRoutes = 5;
constexpr std::array<const char*, kRoutes> kRouteNames = {
    "cudnn", "flash", "efficient", "own", "aten"};

struct Machine {
  int64_t arch = 0;             // ten times the compute capability
  int64_t multiprocessors = 0;  // by which flash sizes its buffers
  int64_t cudnn = 0;            // version of the library that is loaded, 91501 for 9.15.1; 0 = none
  // Of torch.backends.cuda.enable_*_sdp and torch.use_deterministic_algorithms.
  bool cudnn_enabled = true, flash_enabled = true, efficient_enabled = true;
  bool deterministic = false;
};
// The device of a call and the switches of torch; `arch`, multiprocessors and cudnn may be told.
Machine machine_of(const at::Tensor& on_device);
Machine machine_told(int64_t arch, int64_t multiprocessors, int64_t cudnn);

// What the choice depends on. Dims as in ../attention.h.
struct AttentionFacts {
  bool backward = false;
  at::ScalarType dtype = at::kBFloat16;
  int64_t batch = 0, heads = 0, kv_heads = 0, length_q = 0, length_k = 0, width = 0,
          value_width = 0;
  bool masks = false;
  Band band;
  int64_t extra_keys = 0;
  double dropout_p = 0.0, softcap = 0.0;
  bool aligned = true;  // heads and rows begin on 16 bytes, and 32 bits hold what lies between rows
  int64_t scratch = 0;
  // Of backward alone.
  bool knows_out = true;  // as attention_bwd takes it
  bool dweights = false, dmasks = false;
  Machine machine;
};
// Without limits that no query of the call can reach.
Band simplified(const Band&, int64_t length_q, int64_t keys);
AttentionFacts facts_of(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attending&);

// Torch's kernels run on pieces of a group, so that what they allocate fits the scratch bytes.
struct Piece {
  int64_t batch = 0, kv_heads = 0;  // samples and key-value heads; none where even one is too much
};
Piece piece_of(Route, const AttentionFacts&);
// Bytes that torch's kernels allocate for a piece, counting what we copy for them. cuDNN's own
// workspace, which its plan decides, is not in it.
int64_t temporary_bytes(Route, const AttentionFacts&, const Piece&);

// Every reason why `route` cannot run the call; empty if it can.
std::vector<std::string> why_not(Route, const AttentionFacts&);
// The first one with nothing against it.
Route route_of(const AttentionFacts&);

// How many pieces flash cuts the keys into where rows are too few to fill the GPU.
int64_t flash_key_splits(const AttentionFacts&, const Piece&);

}  // namespace fused_remat::cuda
