// Errors of the CUDA runtime as errors of ours.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace fastdist::cuda {

// What an error of the runtime means, for people; `call` is what failed, or "".
[[nodiscard]] std::string explain(cudaError_t error, const std::string& call);

// Throws the Error that stands for it, and clears it, so that no other library trips over it.
[[noreturn]] void throw_error(cudaError_t error, const char* call);

inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw_error(error, call);
}

}  // namespace fastdist::cuda

#define FASTDIST_CUDA_CHECK(call) ::fastdist::cuda::check((call), #call)
