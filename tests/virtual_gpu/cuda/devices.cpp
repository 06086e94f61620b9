// Devices, versions and errors.
//
// VIRTUAL_GPUS sets the number of devices (2); CUDA_VISIBLE_DEVICES selects those visible.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>

#include "virtual_gpu/cuda/state.h"

namespace virtual_gpu {
namespace {

constexpr int kVersion = 13000;
constexpr std::size_t kBytes = std::size_t{4} << 30;

thread_local int the_device = 0;
thread_local std::vector<int> pushed;  // devices whose contexts are current instead
thread_local cudaStreamCaptureMode the_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;

// The machine's numbers of the visible devices. Threads use this until the process ends.
const std::vector<int>& visible() {
  static const auto* const kVisible = new std::vector<int>([] {
    const char* number = std::getenv("VIRTUAL_GPUS");
    const int all = number == nullptr ? 2 : std::atoi(number);
    std::vector<int> result;
    const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
    if (chosen == nullptr) {
      for (int i = 0; i < all; ++i) result.push_back(i);
      return result;
    }
    std::istringstream text(chosen);
    for (std::string word; std::getline(text, word, ',');) {
      const int index = std::atoi(word.c_str());
      if (index < 0 || index >= all) break;  // like CUDA: hides all following devices
      result.push_back(index);
    }
    return result;
  }());
  return *kVisible;
}

}  // namespace

State& state() {
  static State* const kState = [] {
    auto* made = new State;
    for (int device = 0; device < device_count(); ++device) {
      made->legacy.push_back(std::make_shared<CUstream_st>(CUstream_st{device, true, true}));
    }
    return made;
  }();
  return *kState;
}

int device_count() { return static_cast<int>(visible().size()); }

int current_device() { return pushed.empty() ? the_device : pushed.back(); }

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t check_unsafe(State& s, const char* call) {
  cudaError_t error = cudaSuccess;
  if (the_mode == cudaStreamCaptureModeRelaxed) return error;
  for (const auto& capture : s.captures) {
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool forbids = mine ? capture->mode != cudaStreamCaptureModeRelaxed
                              : capture->mode == cudaStreamCaptureModeGlobal &&
                                    the_mode == cudaStreamCaptureModeGlobal;
    if (!forbids) continue;
    capture->is_valid = false;
    std::fprintf(stderr, "virtual GPU: %s invalidates a capture of %s thread\n", call,
                 mine ? "this" : "another");
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t lost = [] {
    const std::lock_guard lock(state().mutex);
    return state().lost;
  }();
  const cudaError_t error = std::exchange(last_error, cudaSuccess);
  return lost != cudaSuccess ? lost : error;
}

#define VIRTUAL_GPU_ERRORS(NAMED)                                                      \
  NAMED(cudaSuccess, "no error")                                                       \
  NAMED(cudaErrorInvalidValue, "invalid argument")                                     \
  NAMED(cudaErrorMemoryAllocation, "out of memory")                                    \
  NAMED(cudaErrorInsufficientDriver, "CUDA driver version is insufficient")            \
  NAMED(cudaErrorNoDevice, "no CUDA-capable device is detected")                       \
  NAMED(cudaErrorInvalidDevice, "invalid device ordinal")                              \
  NAMED(cudaErrorInvalidResourceHandle, "invalid resource handle")                     \
  NAMED(cudaErrorNotReady, "device not ready")                                         \
  NAMED(cudaErrorIllegalAddress, "an illegal memory access was encountered")           \
  NAMED(cudaErrorLaunchFailure, "unspecified launch failure")                          \
  NAMED(cudaErrorNotSupported, "operation not supported")                              \
  NAMED(cudaErrorStreamCaptureUnsupported, "operation not permitted in a capture")     \
  NAMED(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error") \
  NAMED(cudaErrorStreamCaptureMerge, "operation would merge two captures")             \
  NAMED(cudaErrorStreamCaptureUnmatched, "capture was not begun in this stream")       \
  NAMED(cudaErrorStreamCaptureUnjoined, "capture has work that was not joined")        \
  NAMED(cudaErrorStreamCaptureIsolation, "dependency on work outside of the capture")  \
  NAMED(cudaErrorStreamCaptureImplicit, "capture would depend on the default stream")  \
  NAMED(cudaErrorCapturedEvent, "operation not permitted on an event of a capture")    \
  NAMED(cudaErrorStreamCaptureWrongThread, "capture was begun by another thread")

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define VIRTUAL_GPU_NAME(code, text) \
  case code:                         \
    return #code;
    VIRTUAL_GPU_ERRORS(VIRTUAL_GPU_NAME)
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
#define VIRTUAL_GPU_TEXT(code, text) \
  case code:                         \
    return text;
    VIRTUAL_GPU_ERRORS(VIRTUAL_GPU_TEXT)
  }
  return "unrecognized error code";
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return remember(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  *properties = {};
  const int index = visible()[static_cast<std::size_t>(device)];
  std::snprintf(properties->name, sizeof(properties->name), "virtual GPU %d", index);
  std::memcpy(properties->uuid.bytes, "virtual GPU", 11);
  properties->uuid.bytes[15] = static_cast<char>(index);
  properties->totalGlobalMem = kBytes;
  properties->major = 9;
  properties->multiProcessorCount = 1;
  properties->pciBusID = index + 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (device_count() == 0) return remember(cudaErrorNoDevice);
  *device = current_device();
  return cudaSuccess;
}

// Like CUDA's, replaces the context on top of the stack, if any.
cudaError_t cudaSetDevice(int device) {
  if (device_count() == 0) return remember(cudaErrorNoDevice);
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  (pushed.empty() ? the_device : pushed.back()) = device;
  // As of CUDA 12, also if the device is not used otherwise.
  const std::lock_guard lock(state().mutex);
  state().contexts.insert(device);
  return cudaSuccess;
}

void virtual_gpu::push_device(int device) { pushed.push_back(device); }

int virtual_gpu::pop_device() {
  if (pushed.empty()) return -1;
  const int device = pushed.back();
  pushed.pop_back();
  return device;
}

int virtual_gpu::virtual_gpu_has_context(int device) {
  const std::lock_guard lock(state().mutex);
  return state().contexts.contains(device) ? 1 : 0;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, the_mode);
  return cudaSuccess;
}
