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

// The formats of values in rows and messages. An int8 row is a float32 scale, one byte per value,
// and zeros up to a multiple of 4 bytes.
enum class Format : std::uint8_t { kFloat32, kBFloat16, kFloat16, kInt8 };

// Converts rows to and from a narrow format, rounding to nearest, ties to even.
struct Codec {
  void (*widen)(float* values, const std::byte* row, std::size_t count);
  void (*narrow)(std::byte* row, const float* values, std::size_t count);
};

struct Kernels {
  UpdateFunction updates[kRules];                                // in the order of RuleKind
  void (*add)(float* dst, const float* src, std::size_t count);  // dst += src

  Codec codecs[3];  // of bfloat16, float16 and int8
  [[nodiscard]] const Codec& codec(Format narrow) const {
    return codecs[static_cast<std::size_t>(narrow) - 1];
  }

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
