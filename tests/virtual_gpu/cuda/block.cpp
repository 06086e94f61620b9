#include "virtual_gpu/cuda/block.h"

#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <vector>

namespace virtual_gpu {

thread_local Index threadIdx, blockIdx, gridDim;

namespace {

constexpr std::size_t kStackBytes = std::size_t{192} << 10;  // a kernel's parameters take 32 KiB

enum class State { kReady, kAtBarrier, kExchanging, kEnded };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<std::byte[]> stack{new std::byte[kStackBytes]};
  State state;
  unsigned thread;
};

class Block {
 public:
  Block(unsigned threads, const std::function<void()>& body)
      : threads_(threads), body_(body), values_(threads) {}

  void run() {
    while (next_ < threads_) start();
    const auto all = [this](auto has) {
      return std::all_of(fibers_.begin(), fibers_.end(), [&](Fiber* f) { return has(f->state); });
    };
    while (!all([](State state) { return state == State::kEnded; })) {
      for (Fiber* const fiber : fibers_) {
        if (fiber->state == State::kReady) resume(*fiber);
      }
      if (!all([](State state) { return state != State::kAtBarrier; }) &&
          !all([](State state) { return state != State::kExchanging; })) {
        throw std::logic_error("the threads of a block wait for each other at different places");
      }
      for (Fiber* const fiber : fibers_) {
        if (fiber->state != State::kEnded) fiber->state = State::kReady;
      }
    }
  }
  void leave(State state) {
    current_->state = state;
    swapcontext(&current_->context, &main_);
  }
  [[nodiscard]] std::uint32_t& value(unsigned thread) { return values_.at(thread); }

 private:
  // Runs threads that have not begun, until one of them waits.
  void start() {
    static thread_local std::vector<std::unique_ptr<Fiber>> kept;
    if (kept.size() == fibers_.size()) kept.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *kept[fibers_.size()];
    fibers_.push_back(&fiber);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &main_;
    makecontext(&fiber.context, [] { running->begin(); }, 0);
    resume(fiber);
  }
  void begin() {
    Fiber& fiber = *current_;
    while (next_ < threads_) {
      fiber.thread = threadIdx.x = next_++;
      body_();
    }
    fiber.state = State::kEnded;
  }
  void resume(Fiber& fiber) {
    running = this;
    current_ = &fiber;
    threadIdx.x = fiber.thread;
    swapcontext(&main_, &fiber.context);
    running = nullptr;
  }

  unsigned threads_;
  unsigned next_ = 0;
  const std::function<void()>& body_;
  std::vector<std::uint32_t> values_;
  std::vector<Fiber*> fibers_;
  Fiber* current_ = nullptr;
  ucontext_t main_;

 public:
  static thread_local Block* running;
};

thread_local Block* Block::running = nullptr;

}  // namespace

void run_block(unsigned threads, const std::function<void()>& body) { Block(threads, body).run(); }

void await_block() { Block::running->leave(State::kAtBarrier); }

std::uint32_t exchange(std::uint32_t value, unsigned lanes) {
  Block& block = *Block::running;
  const unsigned thread = threadIdx.x;
  block.value(thread) = value;
  block.leave(State::kExchanging);
  const std::uint32_t other = block.value(thread ^ lanes);
  block.leave(State::kExchanging);  // all have read
  return other;
}

}  // namespace virtual_gpu
