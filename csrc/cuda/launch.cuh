// Loads and launches kernels, which host compilers cannot do. The rest of each kernel also compiles
// for virtual GPUs, which replace this file.
#pragma once

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

}  // namespace fastdist::cuda
