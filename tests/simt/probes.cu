// Kernels that use, and misuse, what the runner offers; test_simt.py calls them.
#include <cstdio>
#include <vector>

#include "warp.h"

namespace fused_remat::cuda {
namespace {

// Misuse

__global__ void diverge_by_place(int) {
  if (threadIdx.x % 2 == 0)
    __syncthreads();
  else
    __syncthreads();
}
__global__ void diverge_by_return(int) {
  if (threadIdx.x == 5) return;
  __syncthreads();
}
__global__ void lane_missing(int) {
  if (threadIdx.x != 7) __shfl_sync(0xffffffffu, 1, 0);
}
__global__ void lane_beyond(int) { __syncwarp(0xffffffffu); }
__global__ void lane_not_named(int) { __shfl_sync(0x1u, 1, 0); }
__global__ void source_not_named(int) {
  if (threadIdx.x < 2) __shfl_sync(0x3u, 1, 2);
}
__global__ void warp_diverges(int) {
  if (threadIdx.x < 16)
    __shfl_sync(0xffffffffu, 1, 0);
  else
    __ballot_sync(0xffffffffu, 1);
}
__global__ void mma_diverges(int) {
  float d[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  if (threadIdx.x < 16)
    mma_m16n8k16<c10::Half>(d, a, b);
  else
    mma_m16n8k16<c10::Half>(d, a, b);
}
__global__ void warp_waits_for_barrier(int) {
  if (threadIdx.x < 16)
    __syncwarp();
  else
    __syncthreads();
}
__global__ void overrun(int) { dynamic_shared<char>()[1024] = 1; }
__global__ void misaligned_copy(int) { cp_async_16(dynamic_shared<char>() + 8, nullptr, false); }
__global__ void misaligned_rows(int) {
  uint32_t r[4];
  ldmatrix_x4(r, dynamic_shared<char>() + 2);
}
__global__ void throws(int) {
  if (blockIdx.y == 1 && threadIdx.y == 2) throw std::out_of_range("no such row");
}

struct Misuse {
  const char* name;
  void (*kernel)(int);
};
#define PROBE(kernel) {#kernel, kernel}
constexpr Misuse kMisuses[] = {
    PROBE(diverge_by_place),
    PROBE(diverge_by_return),
    PROBE(lane_missing),
    PROBE(lane_beyond),
    PROBE(lane_not_named),
    PROBE(source_not_named),
    PROBE(warp_diverges),
    PROBE(mma_diverges),
    PROBE(warp_waits_for_barrier),
    PROBE(overrun),
    PROBE(misaligned_copy),
    PROBE(misaligned_rows),
    PROBE(throws)};
#undef PROBE

// Use

// Each thread reads what its right neighbour has written, with a barrier between or without.
__global__ void neighbours(float* out, bool with_barrier) {
  float* shared = dynamic_shared<float>();
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

// What a thread finds in shared memory before anyone has written there.
__global__ void fresh_shared(float* out, bool fixed) {
  __shared__ float array[2];
  float* shared = fixed ? array : dynamic_shared<float>();
  out[blockIdx.x] = shared[1];
  shared[1] = 1;
}

// Two groups of copies; `pending` of them are not waited for.
template <int kPending>
__global__ void copies(const float* in, float* out) {
  float* shared = dynamic_shared<float>();
  for (int group = 0; group < 2; ++group) {
    cp_async_16(shared + 4 * group, in + 4 * group, group == 0);
    cp_async_commit();
  }
  cp_async_wait<kPending>();
  for (int i = 0; i < 8; ++i) out[i] = shared[i];
}

template <class T>
__global__ void multiply(const uint32_t* a, const uint32_t* b, float* d) {
  uint32_t a_part[4], b_part[2];
  float d_part[4];
  for (int i = 0; i < 4; ++i) a_part[i] = a[threadIdx.x * 4 + i];
  for (int i = 0; i < 2; ++i) b_part[i] = b[threadIdx.x * 2 + i];
  for (int i = 0; i < 4; ++i) d_part[i] = d[threadIdx.x * 4 + i];
  mma_m16n8k16<T>(d_part, a_part, b_part);
  for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = d_part[i];
}

// r [32, matrices] of the 8 x 8 matrices at `in`.
__global__ void load_matrices(const uint16_t* in, uint32_t* out, int matrices, bool transposed) {
  auto* shared = dynamic_shared<uint16_t>();
  for (int i = threadIdx.x; i < 256; i += 32) shared[i] = in[i];
  __syncwarp();
  uint32_t four[4], two[2];
  const uint16_t* row = shared + 8 * threadIdx.x;
  if (matrices == 4) {
    transposed ? ldmatrix_x4_trans(four, row) : ldmatrix_x4(four, row);
    for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = four[i];
  } else {
    transposed ? ldmatrix_x2_trans(two, row) : ldmatrix_x2(two, row);
    for (int i = 0; i < 2; ++i) out[threadIdx.x * 2 + i] = two[i];
  }
}

__global__ void warp_functions(const double* in, double* out) {
  const int lane = threadIdx.x;
  const double x = in[lane];
  const float half = static_cast<float>(x);
  double* to = out + lane * 10;
  to[0] = __shfl_sync(0xffffffffu, x, lane + 3, 8);
  to[1] = __shfl_xor_sync(0xffffffffu, half, 5);
  to[2] = __shfl_down_sync(0xffffffffu, lane, 3, 16);
  to[3] = __shfl_up_sync(0xffffffffu, static_cast<long long>(lane) << 40, 2);
  to[4] = __ballot_sync(0xffffffffu, lane % 3 == 0);
  to[5] = __any_sync(0xffffffffu, lane == 9);
  to[6] = __all_sync(0xffffffffu, lane != 9);
  to[7] = warp_sum(half);
  to[8] = warp_sum(x);
  // Lanes of one half go on without the other.
  to[9] = lane < 16 ? __shfl_sync(0xffffu, lane, 4) : -1;
}

__global__ void block_sums(const float* in, float* out) {
  __shared__ float shared[32];
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const float once = block_sum(in[thread], shared);
  out[thread] = once + block_sum(in[thread], shared);
}

__global__ void take_tickets(unsigned* counter, unsigned* order) {
  const unsigned ticket = atomicAdd(counter, 1u);
  order[ticket] = blockIdx.x * blockDim.x + threadIdx.x;
}

__global__ void coordinates(unsigned* out) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  ++out[block * blockDim.x * blockDim.y * blockDim.z + thread];
}

}  // namespace
}  // namespace fused_remat::cuda

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace fused_remat::cuda;

// Runs the misuse of that name; its error goes to `text`.
EXPORT void probe_misuse(const char* name, char* text, size_t bytes) {
  for (const Misuse& misuse : kMisuses) {
    if (std::strcmp(misuse.name, name) != 0) continue;
    const bool partial = std::strcmp(name, "lane_beyond") == 0;
    const dim3 grid = std::strcmp(name, "throws") == 0 ? dim3(1, 2, 1) : dim3(1);
    const dim3 block = std::strcmp(name, "throws") == 0 ? dim3(2, 3, 1) : dim3(partial ? 40 : 64);
    try {
      launch(name, misuse.kernel, grid, block, 1024, Stream{}, 0);
    } catch (const std::exception& error) {
      std::snprintf(text, bytes, "%s", error.what());
    }
    return;
  }
  std::snprintf(text, bytes, "no such misuse");
}

EXPORT void probe_neighbours(float* out, int threads, bool with_barrier) {
  launch("neighbours", neighbours, dim3(1), dim3(threads), threads * 4, {}, out, with_barrier);
}
EXPORT void probe_fresh_shared(float* out, int blocks, bool fixed) {
  launch("fresh_shared", fresh_shared, dim3(blocks), dim3(1), 64, {}, out, fixed);
}
EXPORT void probe_copies(const float* in, float* out, int pending) {
  launch("copies", pending ? copies<1> : copies<0>, dim3(1), dim3(1), 64, {}, in, out);
}
EXPORT void probe_multiply(const uint32_t* a, const uint32_t* b, float* d, bool bfloat16) {
  const auto kernel = bfloat16 ? multiply<c10::BFloat16> : multiply<c10::Half>;
  launch("multiply", kernel, dim3(1), dim3(32), 0, {}, a, b, d);
}
EXPORT void probe_load_matrices(const uint16_t* in, uint32_t* out, int matrices, bool transposed) {
  launch("load_matrices", load_matrices, dim3(1), dim3(32), 512, {}, in, out, matrices, transposed);
}
EXPORT void probe_warp_functions(const double* in, double* out) {
  launch("warp_functions", warp_functions, dim3(1), dim3(32), 0, {}, in, out);
}
EXPORT void probe_block_sums(const float* in, float* out) {
  launch("block_sums", block_sums, dim3(1), dim3(8, 4, 4), 0, {}, in, out);
}
EXPORT void probe_tickets(unsigned* counter, unsigned* order) {
  launch("take_tickets", take_tickets, dim3(3), dim3(50), 0, {}, counter, order);
}
EXPORT void probe_coordinates(unsigned* out) {
  launch("coordinates", coordinates, dim3(2, 3, 4), dim3(5, 2, 3), 0, {}, out);
}
