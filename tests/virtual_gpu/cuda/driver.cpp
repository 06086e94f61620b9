// The driver's functions that fastdist uses, as libcuda.so.1. Results are those of the runtime; a
// context is the number of its device plus 1.

#include <cstdint>

#include "virtual_gpu/cuda/state.h"

using namespace virtual_gpu;

VIRTUAL_GPU_EXPORT int cuDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

VIRTUAL_GPU_EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < device_count() ? cudaSuccess : cudaErrorInvalidDevice;
}

VIRTUAL_GPU_EXPORT int cuDevicePrimaryCtxRetain(std::uintptr_t* context, int device) {
  const std::lock_guard lock(state().mutex);
  state().contexts.insert(device);
  *context = static_cast<std::uintptr_t>(device) + 1;
  return cudaSuccess;
}

VIRTUAL_GPU_EXPORT int cuCtxPushCurrent_v2(std::uintptr_t context) {
  push_device(static_cast<int>(context) - 1);
  return cudaSuccess;
}

VIRTUAL_GPU_EXPORT int cuCtxPopCurrent_v2(std::uintptr_t* context) {
  const int device = pop_device();
  *context = static_cast<std::uintptr_t>(device) + 1;
  return device < 0 ? cudaErrorInvalidValue : cudaSuccess;
}

VIRTUAL_GPU_EXPORT int cuPointerGetAttribute(int* value, int attribute, std::uintptr_t address) {
  constexpr int kMemoryType = 2;
  constexpr int kDeviceMemory = 2;
  const int device = device_of_memory(reinterpret_cast<const void*>(address));
  if (device < 0) return cudaErrorInvalidValue;
  *value = attribute == kMemoryType ? kDeviceMemory : device;
  return cudaSuccess;
}

VIRTUAL_GPU_EXPORT int cuStreamGetCaptureInfo_v2(cudaStream_t stream, int* status,
                                                 unsigned long long* id, void*, const void*,
                                                 const void*) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return s.lost;
  const auto found = find_stream(s, stream, current_device());
  if (!found) return cudaErrorInvalidResourceHandle;
  if (is_implicit(s, *found)) return cudaErrorStreamCaptureImplicit;
  *status = cudaStreamCaptureStatusNone;
  if (found->capture) {
    *status = found->capture->is_valid ? cudaStreamCaptureStatusActive
                                       : cudaStreamCaptureStatusInvalidated;
    *id = found->capture->id;
  }
  return cudaSuccess;
}
