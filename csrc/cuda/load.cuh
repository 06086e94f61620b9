// Loads kernels before their first launch.
#pragma once

#include "cuda/check.h"

namespace fastdist::cuda {

// Loads a kernel onto the current device.
template <class Kernel>
void load(Kernel kernel) {
  cudaFuncAttributes attributes{};
  FASTDIST_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
}

}  // namespace fastdist::cuda
