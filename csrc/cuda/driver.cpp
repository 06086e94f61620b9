#include "cuda/driver.h"

#include <dlfcn.h>

#include <array>
#include <mutex>

#include "core/error.h"
#include "cuda/devices.h"

struct CUctx_st;

namespace fastdist::cuda {
namespace {

// Declared here, since cuda.h is not in every package that has the runtime's headers.
using Result = int;
using Context = CUctx_st*;
constexpr Result kSuccess = 0;
constexpr int kMemoryType = 2;         // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int kDeviceOrdinal = 9;      // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr unsigned kDeviceMemory = 2;  // CU_MEMORYTYPE_DEVICE

void* find_entry(const char* name) {
  static void* const kLibrary = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* const entry = kLibrary == nullptr ? nullptr : ::dlsym(kLibrary, name);
  if (entry != nullptr) return entry;
  refuse(ErrorCode::kUnsupported, "the CUDA driver has no ", name);
}

template <class Function>
Function entry_of(const char* name) {
  return reinterpret_cast<Function>(find_entry(name));
}

// The names include the versions of the functions that have these parameters.
struct Driver {
  Result (*get_device)(int*, int) = entry_of<decltype(get_device)>("cuDeviceGet");
  Result (*retain)(Context*, int) = entry_of<decltype(retain)>("cuDevicePrimaryCtxRetain");
  Result (*push)(Context) = entry_of<decltype(push)>("cuCtxPushCurrent_v2");
  Result (*pop)(Context*) = entry_of<decltype(pop)>("cuCtxPopCurrent_v2");
  Result (*get_attribute)(void*, int, unsigned long long) =
      entry_of<decltype(get_attribute)>("cuPointerGetAttribute");
  Result (*get_capture)(StreamHandle, int*, CaptureId*, void*, const void*,
                        const void*) = entry_of<decltype(get_capture)>("cuStreamGetCaptureInfo_v2");
};

const Driver& driver() {
  static const Driver kDriver;
  return kDriver;
}

void check_driver(Result result, const char* call) {
  if (result == kSuccess) return;
  refuse(ErrorCode::kState, "CUDA: error ", result, " from ", call);
}

// Retained until the process ends.
Context context_of(int device) {
  constexpr std::size_t kMost = 64;
  static std::mutex mutex;
  static std::array<Context, kMost> contexts{};
  const std::lock_guard lock(mutex);
  Context& context = contexts.at(static_cast<std::size_t>(device));
  if (context == nullptr) {
    int handle = 0;
    check_driver(driver().get_device(&handle, device), "cuDeviceGet");
    check_driver(driver().retain(&context, handle), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

}  // namespace

// The runtime's function for this initialises the driver.
int driver_version() noexcept {
  int version = 0;
  try {
    (void)entry_of<Result (*)(int*)>("cuDriverGetVersion")(&version);
  } catch (const Error&) {  // there is no driver
  }
  return version;
}

void push_context(int device) {
  check_driver(driver().push(context_of(device)), "cuCtxPushCurrent");
}

void pop_context() noexcept {
  Context previous = nullptr;
  (void)driver().pop(&previous);
}

std::optional<int> device_of(const void* address) {
  const auto number = reinterpret_cast<unsigned long long>(address);
  unsigned type = 0;
  int device = 0;
  // The driver does not know ordinary memory.
  if (driver().get_attribute(&type, kMemoryType, number) != kSuccess) return std::nullopt;
  if (type != kDeviceMemory) return std::nullopt;
  check_driver(driver().get_attribute(&device, kDeviceOrdinal, number), "cuPointerGetAttribute");
  return device;
}

std::optional<CaptureId> capture_of(StreamHandle stream) {
  constexpr Result kImplicit = 906;  // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
  constexpr int kNone = 0;           // CU_STREAM_CAPTURE_STATUS_NONE
  int status = kNone;
  CaptureId capture = 0;
  const Result result = driver().get_capture(stream, &status, &capture, nullptr, nullptr, nullptr);
  // The default stream while another stream is captured: the default stream is not capturing.
  if (result == kImplicit) return std::nullopt;
  check_driver(result, "cuStreamGetCaptureInfo");
  if (status == kNone) return std::nullopt;
  return capture;
}

}  // namespace fastdist::cuda
