// The GPUs of this machine, and the reason if none can be used.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace fastdist::cuda {

struct DeviceFacts {
  std::string name;
  std::string uuid;  // identifies the GPU, or its MIG instance, across processes and containers
  std::string pci;   // address of the GPU, which its MIG instances share
  int major;         // compute capability
  int minor;
  int multiprocessors;
  std::size_t bytes;
};

// Returns true if this package was built with CUDA.
[[nodiscard]] bool is_built() noexcept;
// Return versions as 1000 · major + 10 · minor; 0 if built without CUDA, or if there is no driver.
[[nodiscard]] int runtime_version() noexcept;
// Does not initialize the driver: a process forked after that could not use it.
[[nodiscard]] int driver_version() noexcept;
// Returns the reason why no GPU can be used, or "".
[[nodiscard]] std::string why_unusable();
// Returns the free memory of the current GPU; the largest number if it is unknown.
[[nodiscard]] std::size_t free_bytes() noexcept;
// Returns the GPUs that this process can use; empty if there are none.
[[nodiscard]] std::vector<DeviceFacts> devices();

}  // namespace fastdist::cuda
