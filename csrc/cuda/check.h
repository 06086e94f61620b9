// Conversion of CUDA runtime errors to Error.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace fastdist::cuda {

// Describes an error for users; `call` is the failed call, or "".
[[nodiscard]] std::string explain(cudaError_t error, const std::string& call);

// Throws the corresponding Error, and clears the runtime's last error so that other libraries do
// not see it.
[[noreturn]] void throw_error(cudaError_t error, const char* call);

inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw_error(error, call);
}

}  // namespace fastdist::cuda

#define FASTDIST_CUDA_CHECK(call) ::fastdist::cuda::check((call), #call)
