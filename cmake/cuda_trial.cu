// Shows that the CUDA compiler works; cmake/cuda.cmake builds it.
#include <cuda_runtime.h>

__global__ void kernel() {}

int main() {
  kernel<<<1, 1>>>();
  return cudaDeviceSynchronize();
}
