// NCCL's memory for torch: the functions that torch.cuda.memory.CUDAPluggableAllocator looks up.

#include <cstddef>

#include "nccl/library.h"

#define FASTDIST_EXPORT extern "C" __attribute__((visibility("default")))

namespace nccl = fastdist::nccl;

// torch has made the device current. If this returns null, torch raises its out-of-memory error.
FASTDIST_EXPORT void* fastdist_allocate(std::size_t bytes, int, nccl::abi::Stream) noexcept {
  const auto* library = nccl::loaded_library();
  void* data = nullptr;
  if (library == nullptr || library->functions.mem_alloc(&data, bytes) != nccl::abi::kSuccess) {
    return nullptr;
  }
  return data;
}

FASTDIST_EXPORT void fastdist_free(void* data, std::size_t, int, nccl::abi::Stream) noexcept {
  const auto* library = nccl::loaded_library();
  if (library != nullptr && data != nullptr) (void)library->functions.mem_free(data);
}
