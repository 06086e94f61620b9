// NVIDIA's __nv_bfloat16 for virtual GPUs.
#pragma once

#include <cstdint>

#include "virtual_gpu/cuda/formats.h"

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  __nv_bfloat16(float x)
      : bits(virtual_gpu::narrow<std::uint16_t>(fastdist::DType::kBFloat16, x)) {}
  operator float() const { return virtual_gpu::widen(fastdist::DType::kBFloat16, bits); }
  std::uint16_t bits;
};
