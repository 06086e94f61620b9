// NVIDIA's __half for virtual GPUs.
#pragma once

#include <cstdint>

#include "virtual_gpu/cuda/formats.h"

struct __half {
  std::uint16_t bits;
};
inline float __half2float(__half x) { return virtual_gpu::widen(fastdist::DType::kFloat16, x); }
inline __half __float2half_rn(float x) {
  return virtual_gpu::narrow<__half>(fastdist::DType::kFloat16, x);
}
