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

 private:
  void compare(std::byte* dst, const std::byte* src, std::size_t bytes) noexcept;

  bool past_caches_ = false;
  int until_comparison_ = 4;
  int period_ = 4;                // copies between comparisons
  double times_[2] = {0.0, 0.0};  // in ns per byte, through and past the caches
};

}  // namespace fastdist::host
