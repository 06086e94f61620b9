#include "host/tuning.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace fastdist::host {
namespace {

// Returns the size of one core's last-level cache, or 0 if the kernel does not report it. sysconf
// is not used: on AMD it reports all caches of a socket together, eight times too much.
std::size_t last_level_cache_bytes() {
  std::size_t largest_kib = 0;
  for (int index = 0;; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) +
                       "/size");
    std::size_t kib = 0;
    if (!(file >> kib)) return largest_kib << 10;  // the kernel prints "32768K"
    largest_kib = std::max(largest_kib, kib);
  }
}

}  // namespace

Tuning tuning_for(int ranks) {
  Tuning tuning;
  const auto n = static_cast<std::size_t>(ranks);
  // All lanes of a rank together use at most 2 MiB, or 32 KiB each.
  const std::size_t share = (std::size_t{2} << 20) / n;
  tuning.lane_bytes =
      std::clamp(share / tuning.lane_chunks, std::size_t{16} << 10, tuning.lane_bytes);
  tuning.lane_chunks = std::clamp(share / tuning.lane_bytes, std::size_t{2}, tuning.lane_chunks);
  // The inputs of all ranks together use at most 32 MiB, or two chunks each.
  const std::size_t most = (std::size_t{32} << 20) / tuning.chunk_bytes / n;
  tuning.ring_chunks = std::clamp(most, std::size_t{2}, tuning.ring_chunks);
  // Arrays larger than the last-level cache bypass it.
  const std::size_t last_level = last_level_cache_bytes();
  if (last_level > 0) tuning.stream_bytes = std::max(std::size_t{16} << 20, last_level);
  return tuning;
}

}  // namespace fastdist::host
