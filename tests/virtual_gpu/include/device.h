// The words of CUDA C++ that fastdist's kernels use, for the host compiler. Included before the
// first line of each kernel file, as nvcc does with its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>

#include "virtual_gpu/cuda/block.h"

#define __global__
#define __device__
#define __grid_constant__ &  // the kernels read such parameters only, and copying them takes long
#define __launch_bounds__(threads)
#define __shared__ static thread_local  // one thread of the CPU runs a whole block
#define __syncthreads() ::virtual_gpu::await_block()
#define __shfl_xor_sync(mask, value, lanes) ::virtual_gpu::exchange(value, lanes)
#define __float_as_uint(x) ::std::bit_cast<std::uint32_t>(x)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using std::isfinite;
using std::max;
using std::min;
using virtual_gpu::blockIdx;
using virtual_gpu::gridDim;
using virtual_gpu::threadIdx;

inline void atomicMax(unsigned* at, unsigned value) {
  const std::atomic_ref largest(*at);
  for (unsigned old = largest; old < value && !largest.compare_exchange_weak(old, value);) {
  }
}
