#include "host/tuning.h"

#include <unistd.h>

#include <algorithm>

namespace fastdist::host {
Tuning tuning_for(int ranks) {
  Tuning tuning;
  // All lanes of a rank together take no more than 2 MiB.
  const std::size_t share = (std::size_t{1} << 20) / static_cast<std::size_t>(ranks);
  tuning.lane_bytes = std::clamp(share, std::size_t{16} << 10, tuning.lane_bytes);
  // Arrays that the last-level cache cannot hold are not worth keeping there.
  const long last_level = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (last_level > 0) {
    tuning.stream_bytes = std::max(std::size_t{16} << 20, static_cast<std::size_t>(last_level));
  }
  return tuning;
}

}  // namespace fastdist::host
