#include "host/signal.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fastdist::host {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

void Bell::ring() noexcept {
  rings.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep_while(std::uint32_t seen, std::chrono::nanoseconds duration) noexcept {
  timespec relative{};
  relative.tv_sec = static_cast<time_t>(duration.count() / 1'000'000'000);
  relative.tv_nsec = static_cast<long>(duration.count() % 1'000'000'000);
  ::syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &relative, nullptr, 0);
}

}  // namespace fastdist::host
