#include "host/tuning.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

namespace fastdist::host {
namespace {

int usable_cores() {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return CPU_COUNT(&cores);
}

}  // namespace

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
  // Somebody else needs the core.
  if (ranks > usable_cores()) tuning.spin = std::chrono::microseconds{1};
  return tuning;
}

}  // namespace fastdist::host
