// The words of CUDA C++ that fastdist's kernels use, for the host compiler. Included before the
// first line of each kernel file, as nvcc does with its own.
#pragma once

#include <algorithm>
#include <cstdint>

#define __global__
#define __device__
#define __grid_constant__ &  // the kernels read such parameters only, and copying them takes long
#define __launch_bounds__(threads)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx;

using std::min;
