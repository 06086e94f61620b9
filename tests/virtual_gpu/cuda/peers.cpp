// Memory that GPUs map from each other: large allocations are files in memory, which other
// processes map by the process and the number of the file.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>

#include "virtual_gpu/cuda/state.h"

using namespace virtual_gpu;

namespace {

struct Name {
  int process;
  int file;
};
static_assert(sizeof(Name) <= sizeof(cudaIpcMemHandle_t));

std::mutex mutex;
std::map<void*, std::size_t> mapped;

}  // namespace

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.allocations.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == s.allocations.end() || found->second.file < 0) {
    return remember(cudaErrorInvalidValue);
  }
  const Name name{::getpid(), found->second.file};
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &name, sizeof(name));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned) {
  Name name{};
  std::memcpy(&name, &handle, sizeof(name));
  const std::string path =
      "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat facts{};
  if (file < 0 || ::fstat(file, &facts) != 0) return remember(cudaErrorInvalidValue);
  const auto bytes = static_cast<std::size_t>(facts.st_size);
  void* const view = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (view == MAP_FAILED) return remember(cudaErrorMemoryAllocation);
  const std::lock_guard lock(mutex);
  mapped[view] = bytes;
  *data = view;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* data) {
  const std::lock_guard lock(mutex);
  const auto found = mapped.find(data);
  if (found == mapped.end()) return remember(cudaErrorInvalidValue);
  ::munmap(data, found->second);
  mapped.erase(found);
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned) {
  return remember(device < device_count() ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  *data = ::operator new(bytes, std::nothrow);
  return remember(*data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaFreeHost(void* data) {
  ::operator delete(data);
  return cudaSuccess;
}
