// Conversions of single floats, by the host engine's loops.
#pragma once

#include <cstddef>

#include "host/kernels.h"

namespace virtual_gpu {

template <class Narrow>
[[nodiscard]] float widen(fastdist::DType dtype, const Narrow& x) {
  float wide;
  fastdist::host::convert(fastdist::DType::kFloat32, reinterpret_cast<std::byte*>(&wide), dtype,
                          reinterpret_cast<const std::byte*>(&x), 1, 1.0F);
  return wide;
}

template <class Narrow>
[[nodiscard]] Narrow narrow(fastdist::DType dtype, float x) {
  Narrow result;
  fastdist::host::convert(dtype, reinterpret_cast<std::byte*>(&result), fastdist::DType::kFloat32,
                          reinterpret_cast<const std::byte*>(&x), 1, 1.0F);
  return result;
}

}  // namespace virtual_gpu
