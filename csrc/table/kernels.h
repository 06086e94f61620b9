// Loops over the elements of rows and dense variables, compiled once per instruction set. All
// versions give the same bits: nothing is contracted, reassociated or approximated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "table/update_rule.h"

namespace fastdist::table {

// `slots` has a pointer to the first element of each of the rule's slots, in their order. Row-wise
// rules take a whole row.
using UpdateFunction = void (*)(const Coefficients& c, float* values, const float* gradient,
                                float* const* slots, std::size_t count);

struct Kernels {
  UpdateFunction updates[kRules];  // in the order of RuleKind
  [[nodiscard]] UpdateFunction update(RuleKind kind) const {
    return updates[static_cast<std::size_t>(kind)];
  }

  void (*add)(float* dst, const float* src, std::size_t count);  // dst += src

  void (*widen_bfloat16)(float* dst, const std::uint16_t* src, std::size_t count);
  // Rounds to nearest, ties to even.
  void (*narrow_bfloat16)(std::uint16_t* dst, const float* src, std::size_t count);

  // IEEE half precision; rounds to nearest, ties to even.
  void (*widen_float16)(float* dst, const std::uint16_t* src, std::size_t count);
  void (*narrow_float16)(std::uint16_t* dst, const float* src, std::size_t count);

  // dst = src × scale
  void (*widen_int8)(float* dst, const std::int8_t* src, float scale, std::size_t count);
  // Returns the scale, such that the largest magnitude is 127 × scale. Values are rounded to the
  // nearest multiple, ties to even. The scale has 16 significant bits, so that 127 × scale is exact
  // and widened values narrow to the same bytes. The scale is NaN if a value is not finite.
  float (*narrow_int8)(std::int8_t* dst, const float* src, std::size_t count);

  std::size_t (*count_nonfinite)(const float* src, std::size_t count);

  // Element i depends only on (key, i).
  void (*uniform)(float* dst, std::size_t count, std::uint64_t key, float low, float high);
  void (*normal)(float* dst, std::size_t count, std::uint64_t key, float mean, float deviation);
};

// Returns the kernels of the widest instruction set that this processor supports.
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
