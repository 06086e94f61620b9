// Loads and launches kernels, and orders memory between GPUs: what host compilers cannot do. The
// rest of each kernel also compiles for virtual GPUs, which replace this file.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/stream.h"

namespace fastdist::cuda {

// Loads a kernel onto the current device, before its first launch.
template <class Kernel>
void load(Kernel kernel) {
  cudaFuncAttributes attributes{};
  FASTDIST_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, StreamHandle stream,
            const std::type_identity_t<Parameters>&... arguments) {
  kernel<<<blocks, threads, 0, stream>>>(arguments...);
  check(cudaGetLastError(), "launch of a kernel(");
}

// These two order memory for all GPUs of the system.
__device__ inline void store_release(std::uint32_t* at, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ inline std::uint32_t load_acquire(const std::uint32_t* at) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

}  // namespace fastdist::cuda
