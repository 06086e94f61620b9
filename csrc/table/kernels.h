// Loops over the elements of rows and of dense variables. Compiled once per instruction set, all
// of them with the same bits as results: nothing is contracted, reassociated or approximated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "table/update_rule.h"

namespace fastdist::table {

// `slots` holds the first element of each of the rule's slots, in its order.
using UpdateFunction = void (*)(const Coefficients& c, float* values, const float* gradient,
                                float* const* slots, std::size_t count);

struct Kernels {
  UpdateFunction (*update)(RuleKind kind);

  void (*add)(float* dst, const float* src, std::size_t count);  // dst += src

  void (*widen_bfloat16)(float* dst, const std::uint16_t* src, std::size_t count);
  // To the nearest, ties to even.
  void (*narrow_bfloat16)(std::uint16_t* dst, const float* src, std::size_t count);

  // IEEE's format of 16 bits; to the nearest, ties to even.
  void (*widen_float16)(float* dst, const std::uint16_t* src, std::size_t count);
  void (*narrow_float16)(std::uint16_t* dst, const float* src, std::size_t count);

  // dst = src × scale
  void (*widen_int8)(float* dst, const std::int8_t* src, float scale, std::size_t count);
  // Returns the scale: the largest magnitude is 127 times it. Values go to the nearest multiple,
  // ties to even. A scale has 16 significant bits, so that 127 times it is exact: what has been
  // widened comes back the same. Where a value is not finite, the scale is NaN.
  float (*narrow_int8)(std::int8_t* dst, const float* src, std::size_t count);

  // As narrow_, but up or down by chance, so that the mean of many is the value. Element i's
  // depends on (key, i) only. What has been widened comes back the same.
  void (*round_bfloat16)(std::uint16_t* dst, const float* src, std::size_t count,
                         std::uint64_t key);
  float (*round_int8)(std::int8_t* dst, const float* src, std::size_t count, std::uint64_t key);

  std::size_t (*count_nonfinite)(const float* src, std::size_t count);

  // Element i depends on (key, i) only.
  void (*uniform)(float* dst, std::size_t count, std::uint64_t key, float low, float high);
  void (*normal)(float* dst, std::size_t count, std::uint64_t key, float mean, float deviation);
};

// Those of the widest instruction set that this processor has.
[[nodiscard]] const Kernels& kernels();

namespace generic {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

}  // namespace fastdist::table
