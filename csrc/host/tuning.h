// Size thresholds between algorithms, and durations of spinning.
#pragma once

#include <chrono>
#include <cstddef>

namespace fastdist::host {

// Must be equal on every rank.
struct Tuning {
  std::size_t slot_bytes = std::size_t{8} << 10;      // largest payload sent with a header
  std::size_t in_place_bytes = std::size_t{1} << 10;  // larger accessible arrays are used in place
  std::size_t chunk_bytes = std::size_t{512} << 10;   // most bytes of input per rank and round
  std::size_t ring_chunks = 4;                        // of chunk_bytes
  std::size_t lane_bytes = std::size_t{128} << 10;    // most bytes of a send per round
  std::size_t lane_chunks = 8;                        // of lane_bytes
  std::size_t stream_bytes = std::size_t{32} << 20;   // results of this size bypass the caches
  std::chrono::nanoseconds hold = std::chrono::microseconds{2};  // spins before yielding
  // Yields before sleeping. Must exceed the time of a wake-up (50 to 100 µs on a virtual machine):
  // otherwise each wake-up delays the other ranks until they sleep too.
  std::chrono::nanoseconds spin = std::chrono::microseconds{500};
  // With more ranks than cores: yields let the other ranks run, cheaper than to sleep and be woken.
  std::chrono::nanoseconds spin_crowded = std::chrono::microseconds{20};
};

[[nodiscard]] Tuning tuning_for(int ranks);

}  // namespace fastdist::host
