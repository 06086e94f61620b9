// The GPUs of this machine, and what keeps them from being used.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace fastdist::cuda {

struct DeviceFacts {
  std::string name;
  std::string uuid;  // tells whether two ranks have the same GPU, in whatever containers they are
  int major;         // compute capability
  int minor;
  int multiprocessors;
  std::size_t bytes;
};

// Whether this package was built with CUDA.
[[nodiscard]] bool is_built() noexcept;
// Versions as 1000 · major + 10 · minor; 0: not built, or no driver.
[[nodiscard]] int runtime_version() noexcept;
[[nodiscard]] int driver_version() noexcept;
// Why no GPU can be used, for people; "" where one can.
[[nodiscard]] std::string why_unusable();
// Every GPU that this process sees; none where none can be used.
[[nodiscard]] std::vector<DeviceFacts> devices();
// The GPU whose memory this is; nothing for other memory.
[[nodiscard]] std::optional<int> device_of(const void* address);

}  // namespace fastdist::cuda
