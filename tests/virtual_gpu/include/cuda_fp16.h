// NVIDIA's __half for virtual GPUs.
#pragma once

#include <cstdint>

#include "virtual_gpu/cuda/formats.h"

struct __half {
  __half() = default;
  __half(float x) : bits(virtual_gpu::narrow<std::uint16_t>(fastdist::DType::kFloat16, x)) {}
  operator float() const { return virtual_gpu::widen(fastdist::DType::kFloat16, bits); }
  std::uint16_t bits;
};
