#include "scheduler.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "fiber.h"
#include "static_shared.h"

namespace simt {
namespace {

enum class State { kReady, kAtBarrier, kInCollective, kFinished };

struct Copy {
  void* shared;
  const void* global;
  size_t bytes;
  bool zeros;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  State state;
  const char* what;  // it waits in
  Where where;
  uint32_t mask;
  void* operand;
  Combine* combine;
  std::vector<Copy> uncommitted;
  std::deque<std::vector<Copy>> groups;
  std::optional<std::string> error;
};

// Shared memory is aligned to 16 bytes and, on purpose, to no more. What lies behind it shows an
// overrun.
constexpr size_t kAlignment = 256, kOffset = 16, kGuard = 256;
constexpr unsigned char kPoison = 0xff;  // NaN in every floating-point type
constexpr unsigned char kCanary = 0xa5;

struct Runner {
  std::mutex one_grid;
  std::mt19937_64 random;
  uint64_t seed = 0;
  std::vector<std::unique_ptr<Stack>> stacks;
  std::vector<unsigned char> shared;
  unsigned char* dynamic = nullptr;
  size_t dynamic_bytes = 0;
  Span fixed{};  // static shared memory
  std::vector<Thread> threads;
  Thread* running = nullptr;
  const char* kernel = "";
  const std::function<void()>* body = nullptr;
};
Runner runner;

std::string name_of(const char* kind, const uint3& index) {
  std::ostringstream text;
  text << kind << " (" << index.x << ", " << index.y << ", " << index.z << ")";
  return text.str();
}

std::string place(const Thread& thread) {
  std::ostringstream text;
  const std::string path = thread.where.file_name();
  text << thread.what << " at " << path.substr(path.rfind('/') + 1) << ":" << thread.where.line();
  return text.str();
}

std::string condition(const Thread& thread) {
  return thread.state == State::kFinished ? "has returned" : "waits in " + place(thread);
}

[[noreturn]] void fail(const Thread& thread, const std::string& message) {
  throw Error(
      std::string("kernel ") + runner.kernel + ", " + name_of("block", blockIdx) + ", " +
      name_of("thread", thread.index) + ": " + message);
}

void thread_main() {
  try {
    (*runner.body)();
  } catch (const std::exception& error) {
    runner.running->error = error.what();
  } catch (...) {
    runner.running->error = "an exception that is no std::exception";
  }
  Thread& thread = *runner.running;
  thread.state = State::kFinished;
  while (true) thread.fiber.suspend();
}

void wait_as(State state, const char* what, Where where) {
  Thread& thread = *runner.running;
  thread.state = state;
  thread.what = what;
  thread.where = where;
}

std::vector<size_t> order_of(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  if (runner.seed != 0) std::shuffle(order.begin(), order.end(), runner.random);
  return order;
}

bool same_place(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         std::strcmp(a.file_name(), b.file_name()) == 0;
}

// All threads are at a barrier: lets them go on if it is the same one.
void release_barrier() {
  const Thread& first = runner.threads.front();
  for (const Thread& thread : runner.threads)
    if (!same_place(thread.where, first.where))
      fail(
          thread, "waits in " + place(thread) + ", while " + name_of("thread", first.index) +
                      " waits in " + place(first) + ": the block's threads diverge");
  for (Thread& thread : runner.threads) thread.state = State::kReady;
}

// No thread can go on: says who waits for whom.
[[noreturn]] void report_deadlock() {
  for (size_t i = 0; i < runner.threads.size(); ++i) {
    const Thread& thread = runner.threads[i];
    if (thread.state != State::kInCollective) continue;
    const size_t warp = i / kLanes * kLanes;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      if (!(thread.mask >> lane & 1)) continue;
      std::ostringstream text;
      text << "waits in " << place(thread) << " for lane " << lane << " of mask 0x" << std::hex
           << thread.mask << ", which ";
      if (warp + lane >= runner.threads.size()) fail(thread, text.str() + "does not exist");
      const Thread& other = runner.threads[warp + lane];
      if (other.state != State::kInCollective || other.mask != thread.mask)
        fail(thread, text.str() + condition(other));
    }
  }
  const auto at_barrier = [](const Thread& thread) { return thread.state == State::kAtBarrier; };
  const Thread *waiting = nullptr, *other = nullptr;
  for (const Thread& thread : runner.threads) (at_barrier(thread) ? waiting : other) = &thread;
  fail(
      *waiting, "waits in " + place(*waiting) + ", but " + name_of("thread", other->index) + " " +
                    condition(*other) + ": the block's threads diverge");
}

void schedule() {
  size_t finished = 0, at_barrier = 0;
  while (finished < runner.threads.size()) {
    bool progress = false;
    finished = at_barrier = 0;
    for (const size_t i : order_of(runner.threads.size())) {
      Thread& thread = runner.threads[i];
      if (thread.state == State::kReady) {
        progress = true;
        runner.running = &thread;
        threadIdx = thread.index;
        thread.fiber.resume();
        if (thread.error) fail(thread, *thread.error);
      }
    }
    for (const Thread& thread : runner.threads) {
      finished += thread.state == State::kFinished;
      at_barrier += thread.state == State::kAtBarrier;
    }
    if (at_barrier == runner.threads.size()) {
      release_barrier();
    } else if (!progress) {
      report_deadlock();
    }
  }
}

void run_block() {
  std::memset(runner.fixed.data, kPoison, runner.fixed.bytes);
  std::memset(runner.dynamic, kPoison, runner.dynamic_bytes);
  std::memset(runner.dynamic + runner.dynamic_bytes, kCanary, kGuard);
  for (size_t i = 0; i < runner.threads.size(); ++i) {
    Thread& thread = runner.threads[i];
    thread.state = State::kReady;
    thread.error.reset();
    thread.uncommitted.clear();
    thread.groups.clear();
    thread.fiber.start(*runner.stacks[i], thread_main);
  }
  schedule();
  for (size_t i = 0; i < kGuard; ++i)
    if (runner.dynamic[runner.dynamic_bytes + i] != kCanary)
      fail(runner.threads.front(), "the block has written behind its dynamic shared memory");
}

void check_configuration(const dim3& grid, const dim3& block, size_t shared_bytes) {
  constexpr size_t kThreads = 1024, kYz = 65535, kShared = 227 * 1024;
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kThreads || block.z > 64)
    throw Error(
        std::string("kernel ") + runner.kernel + ": no block has " + std::to_string(threads) +
        " threads");
  if (grid.x > 0x7fffffffu || grid.y > kYz || grid.z > kYz)
    throw Error(std::string("kernel ") + runner.kernel + ": the grid is too large");
  if (shared_bytes > kShared)
    throw Error(
        std::string("kernel ") + runner.kernel + ": " + std::to_string(shared_bytes) +
        " bytes of shared memory are more than any GPU has");
}

void prepare(const dim3& block, size_t shared_bytes) {
  const size_t count = size_t{block.x} * block.y * block.z;
  while (runner.stacks.size() < count) runner.stacks.push_back(std::make_unique<Stack>());
  runner.threads = std::vector<Thread>(count);
  for (unsigned i = 0; i < count; ++i)
    runner.threads[i].index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
  runner.shared.resize(kAlignment + kOffset + shared_bytes + kGuard);
  const auto address = reinterpret_cast<uintptr_t>(runner.shared.data());
  runner.dynamic = runner.shared.data() + (kAlignment - address % kAlignment) + kOffset;
  runner.dynamic_bytes = shared_bytes;
  runner.fixed = static_shared();
}

}  // namespace

void set_thread_order(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(runner.one_grid);
  runner.seed = seed;
  runner.random.seed(seed);
}

void run_grid(
    const char* kernel, dim3 grid, dim3 block, size_t shared_bytes,
    const std::function<void()>& thread) {
  const size_t blocks = size_t{grid.x} * grid.y * grid.z;
  if (blocks == 0) return;
  const std::lock_guard<std::mutex> lock(runner.one_grid);
  runner.kernel = kernel;
  check_configuration(grid, block, shared_bytes);
  runner.body = &thread;
  gridDim = grid;
  blockDim = block;
  prepare(block, shared_bytes);
  for (const size_t i : order_of(blocks)) {
    blockIdx = {
        static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
        static_cast<unsigned>(i / grid.x / grid.y)};
    run_block();
  }
}

void* dynamic_shared() { return runner.dynamic; }

void barrier(Where where) {
  wait_as(State::kAtBarrier, "__syncthreads", where);
  runner.running->fiber.suspend();
}

void collective(
    const char* what, uint32_t mask, bool aligned, void* operand, Combine* combine, Where where) {
  Thread& self = *runner.running;
  const size_t index = &self - runner.threads.data(), warp = index / kLanes * kLanes;
  if (!(mask >> index % kLanes & 1))
    throw Error(std::string(what) + ": the mask does not name the calling lane");
  wait_as(State::kInCollective, what, where);
  self.mask = mask;
  self.operand = operand;
  void* operands[kLanes] = {};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const size_t other = warp + lane;
    if (other >= runner.threads.size() || runner.threads[other].state != State::kInCollective ||
        runner.threads[other].mask != mask) {
      self.fiber.suspend();
      return;
    }
    operands[lane] = runner.threads[other].operand;
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (operands[lane] == nullptr) continue;
    Thread& other = runner.threads[warp + lane];
    if (std::strcmp(other.what, what) != 0 || (aligned && !same_place(other.where, where)))
      throw Error(
          "waits in " + place(self) + ", while " + name_of("thread", other.index) + " " +
          condition(other) + ": the warp's lanes diverge");
  }
  combine(operands, mask);
  for (size_t lane = 0; lane < kLanes; ++lane)
    if (operands[lane] != nullptr) runner.threads[warp + lane].state = State::kReady;
}

void copy_later(void* shared, const void* global, size_t bytes, bool zeros) {
  std::memset(shared, kPoison, bytes);
  runner.running->uncommitted.push_back({shared, global, bytes, zeros});
}

void commit_copies() {
  runner.running->groups.push_back(std::move(runner.running->uncommitted));
  runner.running->uncommitted.clear();
}

void wait_copies(size_t pending_groups) {
  auto& groups = runner.running->groups;
  for (; groups.size() > pending_groups; groups.pop_front())
    for (const Copy& copy : groups.front())
      copy.zeros ? std::memset(copy.shared, 0, copy.bytes)
                 : std::memcpy(copy.shared, copy.global, copy.bytes);
}

}  // namespace simt

extern "C" __attribute__((visibility("default"))) void simt_set_thread_order(uint64_t seed) {
  simt::set_thread_order(seed);
}

extern "C" __attribute__((visibility("default"))) void simt_set_capability(int capability) {
  simt::capability = capability;
}
