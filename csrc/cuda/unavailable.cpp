// This folder's functions in builds without CUDA.

#include "core/error.h"
#include "cuda/devices.h"
#include "cuda/driver.h"
#include "cuda/packed_list.h"

namespace fastdist::cuda {

bool is_built() noexcept { return false; }
int runtime_version() noexcept { return 0; }
int driver_version() noexcept { return 0; }
std::string why_unusable() {
  return "this package was built without CUDA; rebuild it with FASTDIST_CUDA=on";
}
std::vector<DeviceFacts> devices() { return {}; }
std::optional<int> device_of(const void*) { return std::nullopt; }

std::unique_ptr<PackedList> make_packed_list(const std::vector<TensorView>&, std::optional<DType>,
                                             std::size_t, int) {
  throw Error(ErrorCode::kUnsupported, why_unusable());
}

}  // namespace fastdist::cuda
