// Conversions between float and floating formats of 16 and 8 bits, rounded to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace fastdist::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(double x) { return static_cast<float>(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ inline float to_float(__nv_fp8_e5m2 x) { return static_cast<float>(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float(float x) {
  return x;
}
template <>
__device__ inline double from_float(float x) {
  return x;
}
template <>
__device__ inline __half from_float(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}
// Values that are too large become infinite or NaN rather than the largest number, so that
// overflows are visible.
template <>
__device__ inline __nv_fp8_e4m3 from_float(float x) {
  __nv_fp8_e4m3 result;
  result.__x = __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E4M3);
  return result;
}
template <>
__device__ inline __nv_fp8_e5m2 from_float(float x) {
  __nv_fp8_e5m2 result;
  result.__x = __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E5M2);
  return result;
}

}  // namespace fastdist::cuda
