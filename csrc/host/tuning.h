// Sizes where one algorithm hands over to the next, and how long to wait awake.
#pragma once

#include <chrono>
#include <cstddef>

namespace fastdist::host {

// The same on every rank.
struct Tuning {
  std::size_t slot_bytes = std::size_t{8} << 10;      // largest payload that rides with a header
  std::size_t in_place_bytes = std::size_t{1} << 10;  // reachable arrays are used in place above
  std::size_t chunk_bytes = std::size_t{512} << 10;   // of input per rank and round
  std::size_t lane_bytes = std::size_t{128} << 10;    // of a send per round
  std::size_t stream_bytes = std::size_t{32} << 20;   // results from here on bypass the caches
  std::chrono::nanoseconds hold = std::chrono::microseconds{2};  // spinning before yielding
  // Yielding before sleeping. Longer than waking up takes (50 to 100 µs on a virtual machine), or
  // each wake-up makes the others wait long enough to fall asleep too.
  std::chrono::nanoseconds spin = std::chrono::microseconds{500};
  std::chrono::nanoseconds spin_crowded = std::chrono::microseconds{1};  // more ranks than cores
};

// What suits so many ranks on this machine.
[[nodiscard]] Tuning tuning_for(int ranks);

}  // namespace fastdist::host
