// This folder's functions in builds without CUDA.

#include "cuda/devices.h"
#include "cuda/driver.h"

namespace fastdist::cuda {

bool is_built() noexcept { return false; }
int runtime_version() noexcept { return 0; }
int driver_version() noexcept { return 0; }
std::string why_unusable() {
  return "this package was built without CUDA; rebuild it with FASTDIST_CUDA=on";
}
std::vector<DeviceFacts> devices() { return {}; }
std::optional<int> device_of(const void*) { return std::nullopt; }

}  // namespace fastdist::cuda
