// A stack of its own for each thread of a block, and the switch between stacks.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

// FUSED_REMAT_SIMT_UCONTEXT: as where nobody has written the switch by hand.
#if !defined(__x86_64__) && !defined(FUSED_REMAT_SIMT_UCONTEXT)
#define FUSED_REMAT_SIMT_UCONTEXT
#endif
#if defined(FUSED_REMAT_SIMT_UCONTEXT)
#include <ucontext.h>
#endif

namespace simt {

// Memory of one stack; an overflow meets a page that may not be touched.
class Stack {
 public:
  Stack() {
    base_ = mmap(
        nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
        0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(base_, static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
  }
  Stack(const Stack&) = delete;
  ~Stack() { munmap(base_, kBytes); }
  void* base() const { return base_; }
  static constexpr size_t kBytes = 256 * 1024;

 private:
  void* base_;
};

#if !defined(FUSED_REMAT_SIMT_UCONTEXT)

// Saves what a function must preserve, stores the stack pointer in *from and goes on where `to` was
// saved.
__attribute__((naked, noinline)) inline void switch_stacks(void** /*from*/, void* /*to*/) {
  asm("pushq %rbp\n\t"
      "pushq %rbx\n\t"
      "pushq %r12\n\t"
      "pushq %r13\n\t"
      "pushq %r14\n\t"
      "pushq %r15\n\t"
      "movq %rsp, (%rdi)\n\t"
      "movq %rsi, %rsp\n\t"
      "popq %r15\n\t"
      "popq %r14\n\t"
      "popq %r13\n\t"
      "popq %r12\n\t"
      "popq %rbx\n\t"
      "popq %rbp\n\t"
      "ret");
}

class Fiber {
 public:
  // The next resume() calls `entry`, which must suspend for ever instead of returning.
  void start(const Stack& stack, void (*entry)()) {
    auto* slots = reinterpret_cast<void**>(static_cast<char*>(stack.base()) + Stack::kBytes);
    *--slots = nullptr;  // where entry would return to
    *--slots = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--slots = nullptr;
    mine_ = slots;
  }
  void resume() { switch_stacks(&caller_, mine_); }
  void suspend() { switch_stacks(&mine_, caller_); }

 private:
  void* mine_ = nullptr;
  void* caller_ = nullptr;
};

#else

class Fiber {
 public:
  void start(const Stack& stack, void (*entry)()) {
    getcontext(&mine_);
    mine_.uc_stack.ss_sp = stack.base();
    mine_.uc_stack.ss_size = Stack::kBytes;
    mine_.uc_link = nullptr;
    makecontext(&mine_, entry, 0);
  }
  void resume() { swapcontext(&caller_, &mine_); }
  void suspend() { swapcontext(&mine_, &caller_); }

 private:
  ucontext_t mine_, caller_;
};

#endif

}  // namespace simt
