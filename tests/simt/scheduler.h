// Runs the blocks of a grid one after another, the threads of a block as fibers in turns.
//
// One grid runs at a time in a process. The order of blocks and threads follows a seed: code whose
// result depends on it has a race. A thread runs until it waits for others, so that what another
// thread does between two statements is not seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <stdexcept>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace simt {

using Where = std::source_location;
constexpr int kLanes = 32;

// Raised in the thread that does what CUDA leaves undefined; the launch raises it with the names of
// kernel, block and thread in front.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Of the device that host code asks about, 80 = 8.0; 0 where a test did not say.
inline int capability = 0;

// 0: ascending, the same every time. Other seeds: shuffled.
void set_thread_order(uint64_t seed);

// Calls `thread` once per thread of the grid; returns when all are done.
void run_grid(
    const char* kernel, dim3 grid, dim3 block, size_t shared_bytes,
    const std::function<void()>& thread);

void* dynamic_shared();

void barrier(Where);

// What the lanes named in `mask` do together. Each waits until all have come, with the same mask
// and the same `what`; then `combine(operands, mask)` runs once, with the operand that each lane
// has passed. Where `aligned`, all must come from the same place in the source.
using Combine = void(void* const (&operands)[kLanes], uint32_t mask);
void collective(
    const char* what, uint32_t mask, bool aligned, void* operand, Combine* combine, Where);

// Copies that have been asked for but have not landed, of the running thread.
void copy_later(void* shared, const void* global, size_t bytes, bool zeros);
void commit_copies();
void wait_copies(size_t pending_groups);

}  // namespace simt
