// NVIDIA's floats of 8 bits for virtual GPUs.
#pragma once

#include <cstdint>

#include "virtual_gpu/cuda/formats.h"

struct __nv_fp8_e4m3 {
  std::uint8_t __x;
  explicit operator float() const {
    return virtual_gpu::widen(fastdist::DType::kFloat8E4M3FN, __x);
  }
};
struct __nv_fp8_e5m2 {
  std::uint8_t __x;
  explicit operator float() const { return virtual_gpu::widen(fastdist::DType::kFloat8E5M2, __x); }
};
enum __nv_saturation_t { __NV_NOSAT };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

inline std::uint8_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t,
                                          __nv_fp8_interpretation_t kind) {
  return virtual_gpu::narrow<std::uint8_t>(
      kind == __NV_E4M3 ? fastdist::DType::kFloat8E4M3FN : fastdist::DType::kFloat8E5M2, x);
}
