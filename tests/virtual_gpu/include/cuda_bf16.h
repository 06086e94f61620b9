// NVIDIA's __nv_bfloat16 for virtual GPUs.
#pragma once

#include <cstdint>

#include "virtual_gpu/cuda/formats.h"

struct __nv_bfloat16 {
  std::uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  return virtual_gpu::widen(fastdist::DType::kBFloat16, x);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  return virtual_gpu::narrow<__nv_bfloat16>(fastdist::DType::kBFloat16, x);
}
