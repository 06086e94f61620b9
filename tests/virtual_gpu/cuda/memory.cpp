// Device memory: host memory with a record of its owner, so that an access beyond an allocation or
// to another device's memory loses the device, as on a real GPU.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>

#include "virtual_gpu/cuda/state.h"

namespace virtual_gpu {
namespace {

constexpr std::size_t kBytesOfDevice = std::size_t{4} << 30;
constexpr auto kAlignment = std::align_val_t{256};

// Returns the allocation that contains an address, or end().
auto find_allocation(const State& s, const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto after = s.allocations.upper_bound(address);
  if (after == s.allocations.begin()) return s.allocations.end();
  const auto found = std::prev(after);
  return address < found->first + found->second.bytes ? found : s.allocations.end();
}

std::string hex(const void* data) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", data);
  return text;
}

std::size_t bytes_in_use(const State& s, int device) {
  std::size_t sum = 0;
  for (const auto& [address, allocation] : s.allocations) {
    if (allocation.device == device) sum += allocation.bytes;
  }
  return sum;
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t stream) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (s.lost != cudaSuccess) return s.lost;
  const auto found = find_stream(s, stream, current_device());
  if (!found) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;  // the pointers may be null
  const int device = found->device;
  if (kind == cudaMemcpyDeviceToDevice) {
    return add(
        s, found,
        [=] {
          check_memory(from, bytes, device);
          check_memory(to, bytes, device);
          std::memmove(to, from, bytes);
        },
        nullptr);
  }
  if (found->capture) return cudaErrorNotSupported;  // no test needs it
  if (kind == cudaMemcpyHostToDevice) {
    // Pageable memory is read before the call returns.
    const auto* begin = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    return add(
        s, found,
        [=] {
          check_memory(to, staged->size(), device);
          std::memcpy(to, staged->data(), staged->size());
        },
        nullptr);
  }
  const cudaError_t error = add(
      s, found,
      [=] {
        check_memory(from, bytes, device);
        std::memcpy(to, from, bytes);
      },
      nullptr);
  // Pageable memory is written before the call returns.
  if (error == cudaSuccess) wait_for(s, lock, found->tail);
  return error == cudaSuccess ? s.lost : error;
}

cudaError_t set(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  const int device = current_device();
  return enqueue(stream, device, [=] {
    check_memory(to, bytes, device);
    std::memset(to, value, bytes);
  });
}

cudaError_t release(State& s, void* data) {
  const auto found = s.allocations.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == s.allocations.end()) return cudaErrorInvalidValue;
  const Allocation was = found->second;
  std::memset(data, kFreed, was.bytes);
  s.allocations.erase(found);
  ::operator delete(data, kAlignment);
  return s.lost;
}

}  // namespace

cudaError_t free_now(void* data) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return release(s, data);
}

void check_memory(const void* data, std::size_t bytes, int device) {
  if (bytes == 0) return;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = find_allocation(s, data);
  const std::string where = std::to_string(bytes) + " bytes at " + hex(data);
  if (found == s.allocations.end()) {
    throw Failure(cudaErrorIllegalAddress, where + " are not device memory");
  }
  if (found->second.device != device) {
    throw Failure(cudaErrorIllegalAddress,
                  where + " are memory of device " + std::to_string(found->second.device));
  }
  if (reinterpret_cast<std::uintptr_t>(data) + bytes > found->first + found->second.bytes) {
    throw Failure(cudaErrorIllegalAddress, where + " extend beyond their allocation");
  }
}

bool is_allocation(const void* data, std::size_t bytes, int device) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.allocations.find(reinterpret_cast<std::uintptr_t>(data));
  return found != s.allocations.end() && found->second.device == device &&
         bytes <= found->second.bytes;
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

cudaError_t cudaMalloc(void** data, size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return remember(s.lost);
  if (device_count() == 0) return remember(cudaErrorNoDevice);
  if (const cudaError_t error = check_unsafe(s, __func__); error != cudaSuccess)
    return remember(error);
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  const int device = current_device();
  if (bytes > kBytesOfDevice - bytes_in_use(s, device)) return remember(cudaErrorMemoryAllocation);
  *data = ::operator new(bytes, kAlignment, std::nothrow);
  if (*data == nullptr) return remember(cudaErrorMemoryAllocation);
  std::memset(*data, kFresh, bytes);
  s.allocations[reinterpret_cast<std::uintptr_t>(*data)] = {bytes, device};
  return cudaSuccess;
}

// Waits for the device, which the real function does in effect.
cudaError_t cudaFree(void* data) {
  if (data == nullptr) return cudaSuccess;
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (const cudaError_t error = check_unsafe(s, __func__); error != cudaSuccess) {
    return remember(error);
  }
  const auto found = s.allocations.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == s.allocations.end()) return remember(cudaErrorInvalidValue);
  wait_for_device(s, lock, found->second.device);
  return remember(release(s, data));
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return remember(s.lost);
  *all = kBytesOfDevice;
  *free = kBytesOfDevice - bytes_in_use(s, current_device());
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return remember(copy(to, from, bytes, kind, stream));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = copy(to, from, bytes, kind, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : remember(error);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return remember(set(to, value, bytes, stream));
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return remember(set(to, value, bytes, nullptr));
}

unsigned long virtual_gpu::virtual_gpu_bytes_in_use(int device) {
  const std::lock_guard lock(state().mutex);
  return bytes_in_use(state(), device);
}

int virtual_gpu::device_of_memory(const void* address) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = find_allocation(s, address);
  return found == s.allocations.end() ? -1 : found->second.device;
}
