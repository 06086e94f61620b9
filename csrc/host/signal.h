// Waiting for a peer and waking it: spin briefly, then sleep in the kernel.
//
// A waiting rank watches one word of one peer. Before it sleeps, it names that peer in its Bell. A
// peer that has stored a new value checks the bells of the other ranks and rings those that wait
// for it. Both ranks first store and then load the other's word, with sequential consistency, so at
// least one of them sees the other's store: a wake-up cannot be lost.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace fastdist::host {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

inline constexpr std::size_t kCacheLine = 64;

inline void cpu_relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One cache line in shared memory per waiting thread of a rank. Zero bytes are the initial state.
struct alignas(kCacheLine) Bell {
  std::atomic<std::uint32_t> waits_for;  // rank + 1, or 0 for nobody
  std::atomic<std::uint32_t> rings;      // the futex word

  // Called by rank `by` after it has stored a new value with sequential consistency.
  void ring_if_waiting(int by) noexcept {
    const std::uint32_t target = waits_for.load(std::memory_order_seq_cst);
    if (target == static_cast<std::uint32_t>(by) + 1) ring();
  }
  void ring() noexcept {
    rings.fetch_add(1, std::memory_order_seq_cst);
    ::syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Announces the wait and then, unless `ready()`, sleeps until rung or until `duration` has
  // passed, which is less than a second.
  void sleep(std::uint32_t target, std::chrono::nanoseconds duration, auto ready) noexcept {
    const std::uint32_t seen = rings.load(std::memory_order_relaxed);
    waits_for.store(target, std::memory_order_seq_cst);
    if (!ready()) {
      const timespec relative{.tv_sec = 0, .tv_nsec = duration.count()};
      ::syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &relative, nullptr, 0);
    }
    waits_for.store(0, std::memory_order_relaxed);
  }
};

}  // namespace fastdist::host
