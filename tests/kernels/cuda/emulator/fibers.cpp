#include "tests/kernels/cuda/emulator/fibers.h"

#include <cstdint>
#include <cstdlib>
#include <utility>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace dmuon::kernels::cuda::emulator {
namespace {

constexpr std::size_t kStackBytes = std::size_t{64} << 10;
constexpr std::uint64_t kMark = 0x5afe57ac;  // in the last word of a stack

}  // namespace

#if defined(__x86_64__)
// Saves the registers that a call keeps, and exchanges the stacks. glibc's swapcontext makes two
// system calls more.
extern "C" void dmuon_switch_fiber(void** from, void* to);
asm(R"(.text
.globl dmuon_switch_fiber
.hidden dmuon_switch_fiber
.type dmuon_switch_fiber,@function
dmuon_switch_fiber:
 pushq %rbp
 pushq %rbx
 pushq %r12
 pushq %r13
 pushq %r14
 pushq %r15
 movq %rsp, (%rdi)
 movq %rsi, %rsp
 popq %r15
 popq %r14
 popq %r13
 popq %r12
 popq %rbx
 popq %rbp
 ret
.size dmuon_switch_fiber,.-dmuon_switch_fiber
)");
struct Context {
  void* stack_pointer = nullptr;

  void make(std::uint64_t* stack, void (*begin)()) {
    auto* top = stack + kStackBytes / sizeof *stack;
    *--top = 0;
    *--top = reinterpret_cast<std::uint64_t>(begin);
    for (int i = 0; i < 6; ++i) *--top = 0;  // registers
    stack_pointer = top;
  }
  static void change(Context& from, Context& to) {
    dmuon_switch_fiber(&from.stack_pointer, to.stack_pointer);
  }
};
#else
struct Context {
  ucontext_t context{};

  void make(std::uint64_t* stack, void (*begin)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    makecontext(&context, begin, 0);
  }
  static void change(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};
#endif

struct Fiber::State {
  std::unique_ptr<std::uint64_t[]> stack{new std::uint64_t[kStackBytes / sizeof(std::uint64_t)]};
  std::function<void()> body;
  Context own;
  Context resumer;
  bool ended = true;

  static inline State* current = nullptr;

  static void begin() {
    current->body();
    current->ended = true;
    Context::change(current->own, current->resumer);
    std::abort();  // an ended fiber was resumed
  }
};

Fiber::Fiber() : state_(std::make_unique<State>()) {}
Fiber::~Fiber() = default;
Fiber::Fiber(Fiber&&) noexcept = default;

void Fiber::start(std::function<void()> body) {
  state_->body = std::move(body);
#if defined(__SANITIZE_ADDRESS__)
  // A fiber that was abandoned has left the marks of its frames.
  __asan_unpoison_memory_region(state_->stack.get(), kStackBytes);
#endif
  state_->stack[0] = kMark;
  state_->own.make(state_->stack.get(), State::begin);
  state_->ended = false;
}

void Fiber::resume() {
  State::current = state_.get();
  Context::change(state_->resumer, state_->own);
}

void Fiber::pause() { Context::change(State::current->own, State::current->resumer); }
bool Fiber::ended() const { return state_->ended; }
bool Fiber::overflowed() const { return state_->stack[0] != kMark; }

}  // namespace dmuon::kernels::cuda::emulator
