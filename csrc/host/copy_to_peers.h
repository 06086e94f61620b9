// Copies into memory that peers read, past the caches where that is faster.
#pragma once

#include <cstddef>

namespace fastdist::host {

// Before a core writes a line that another core's cache holds, that copy is discarded. Between
// cores that share a last-level cache this takes a few nanoseconds per line; elsewhere up to 35,
// far longer than to read the line. Stores that bypass the caches do not wait for it, but the peer
// then reads from memory. Which is faster depends on where the cores are, which may change: the
// host of a virtual machine moves them. So both ways are timed now and then.
class CopyToPeers {
 public:
  void operator()(std::byte* dst, const std::byte* src, std::size_t bytes) noexcept;

  [[nodiscard]] bool past_caches() const noexcept { return past_caches_; }

 private:
  void compare(std::byte* dst, const std::byte* src) noexcept;

  bool past_caches_ = false;
  // Bytes to copy until the next comparison, and between comparisons.
  std::ptrdiff_t period_ = std::ptrdiff_t{64} << 10;
  std::ptrdiff_t until_comparison_ = period_;
};

}  // namespace fastdist::host
