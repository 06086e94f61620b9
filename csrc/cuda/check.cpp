#include "cuda/check.h"

#include "core/error.h"
#include "cuda/devices.h"

namespace fastdist::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Without a driver, the runtime reports one that is too old, which would be misleading.
std::string explain_driver() {
  const int driver = driver_version();
  if (driver == 0) {
    return "there is no CUDA driver on this machine (libcuda.so.1 was not found); in a container, "
           "start it with the GPUs made visible";
  }
  return "the CUDA driver is too old: it supports CUDA " + version_text(driver) +
         ", and this package was built with CUDA " + version_text(runtime_version()) +
         "; update the driver, or build with an older toolkit";
}

ErrorCode code_of(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return ErrorCode::kMemory;
  if (error == cudaErrorInvalidDevice) return ErrorCode::kValue;
  if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) {
    return ErrorCode::kUnsupported;
  }
  return ErrorCode::kState;
}

}  // namespace

std::string explain(cudaError_t error, const std::string& call) {
  if (error == cudaErrorInsufficientDriver) return explain_driver();
  if (error == cudaErrorNoDevice) {
    return "the CUDA driver finds no GPU that this process may use: there is none, or "
           "CUDA_VISIBLE_DEVICES hides it";
  }
  std::string text = std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")";
  if (error == cudaErrorInvalidResourceHandle) text += ", e.g. for a stream of another GPU,";
  return call.empty() ? text : text + " from " + call.substr(0, call.find('('));
}

void throw_error(cudaError_t error, const char* call) {
  (void)cudaGetLastError();
  throw Error(code_of(error), "CUDA: " + explain(error, call));
}

}  // namespace fastdist::cuda
