#include "host/copy_to_peers.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "host/kernels.h"

namespace fastdist::host {
namespace {

constexpr std::size_t kTimed = 8192;
constexpr std::size_t kLeastPastCaches = 1024;
constexpr std::ptrdiff_t kLongestPeriod = std::ptrdiff_t{2} << 20;
// How much faster than through the caches stores must be past them, since the peer then reads from
// memory. Of 4 KiB, with waiting for memory, they take twice as long where cores are near each
// other, and a fourth of the time where they are not.
constexpr double kGain = 2.0;

}  // namespace

void CopyToPeers::operator()(std::byte* dst, const std::byte* src, std::size_t bytes) noexcept {
  until_comparison_ -= static_cast<std::ptrdiff_t>(bytes);
  if (until_comparison_ <= 0 && bytes >= kTimed) {
    compare(dst, src);
    dst += kTimed;
    src += kTimed;
    bytes -= kTimed;
  }
  copy(dst, src, bytes, past_caches_ && bytes >= kLeastPastCaches);
}

// Copies kTimed bytes, half of them each way.
void CopyToPeers::compare(std::byte* dst, const std::byte* src) noexcept {
  using Clock = std::chrono::steady_clock;
  constexpr std::size_t kHalf = kTimed / 2;
  // A core goes on before its stores have been done, but not past an exchange.
  std::atomic<bool> word{false};
  const auto wait_for_stores = [&] { word.exchange(true, std::memory_order_seq_cst); };
  wait_for_stores();
  const auto start = Clock::now();
  copy(dst, src, kHalf, false);
  wait_for_stores();
  const auto middle = Clock::now();
  copy(dst + kHalf, src + kHalf, kHalf, true);
  wait_for_stores();
  const auto end = Clock::now();
  past_caches_ = middle - start > kGain * (end - middle);
  period_ = std::min(2 * period_, kLongestPeriod);
  until_comparison_ = period_;
}

}  // namespace fastdist::host
