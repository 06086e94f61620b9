// The loops behind kernels.h, written for the compiler to vectorize. Each kernels_<set>.cpp defines
// FASTDIST_ISA and includes this file under its own compiler flags. Everything has internal linkage
// and no standard templates are called, so that the linker cannot pick a function compiled for a
// wide instruction set for another file.

#if !defined(FASTDIST_ISA)
#error "include this file only from kernels_<instruction set>.cpp"
#endif

#include <cstddef>
#include <cstdint>

#include "table/kernels.h"

namespace fastdist::table::FASTDIST_ISA {
namespace {

inline std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// --- update rules ----------------------------------------------------------------------------

inline float effective(const Coefficients& c, float gradient, float value) {
  const float g = c.sign * gradient;
  // Skipped if zero: the value may be infinite.
  return c.weight_decay == 0 ? g : g + c.weight_decay * value;
}

template <bool kNesterov>
void momentum_loop(const Coefficients& coefficients, float* __restrict values,
                   const float* __restrict gradient, float* __restrict momenta, std::size_t count) {
  const Coefficients c = coefficients;
  for (std::size_t i = 0; i < count; ++i) {
    const float g = effective(c, gradient[i], values[i]);
    const float old = momenta[i];
    const float next = c.momentum * old + c.undampened * g;
    const float momentum = bits_of(old) == kUnsetMomentum ? g : next;
    momenta[i] = momentum;
    values[i] -= c.rate * (kNesterov ? g + c.momentum * momentum : momentum);
  }
}

void sgd(const Coefficients& coefficients, float* __restrict values,
         const float* __restrict gradient, float* const* slots, std::size_t count) {
  const Coefficients c = coefficients;
  if (c.momentum == 0) {
    for (std::size_t i = 0; i < count; ++i) {
      values[i] -= c.rate * effective(c, gradient[i], values[i]);
    }
  } else {
    (c.nesterov ? momentum_loop<true> : momentum_loop<false>)(c, values, gradient, slots[0], count);
  }
}

void adagrad(const Coefficients& coefficients, float* __restrict values,
             const float* __restrict gradient, float* const* slots, std::size_t count) {
  const Coefficients c = coefficients;
  float* __restrict sums = slots[0];
  for (std::size_t i = 0; i < count; ++i) {
    const float g = effective(c, gradient[i], values[i]);
    const float sum = sums[i] + g * g;
    sums[i] = sum;
    values[i] -= c.rate * (g / (__builtin_sqrtf(sum) + c.eps));
  }
}

// Every instruction set has the same number of partial sums, so that all add in the same order.
constexpr std::size_t kLanes = 16;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

inline void add_squares(const Coefficients& c, const float* values, const float* gradient,
                        std::size_t count, Lanes& sums) {
  Lanes g{};
  __builtin_memcpy(&g, gradient, count * sizeof(float));
  g *= c.sign;
  if (c.weight_decay != 0) {
    Lanes v{};
    __builtin_memcpy(&v, values, count * sizeof(float));
    g += c.weight_decay * v;
  }
  sums += g * g;
}

// The row's sum grows by the mean of its squared gradient: EXACT_ROWWISE_ADAGRAD of FBGEMM.
void row_wise_adagrad(const Coefficients& coefficients, float* __restrict values,
                      const float* __restrict gradient, float* const* slots, std::size_t count) {
  const Coefficients c = coefficients;
  Lanes squares{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    add_squares(c, values + i, gradient + i, kLanes, squares);
  }
  if (i < count) add_squares(c, values + i, gradient + i, count - i, squares);
  float total = 0;
  for (i = 0; i < kLanes / 4; ++i) {
    total += squares[i] + squares[i + 4] + (squares[i + 8] + squares[i + 12]);
  }
  const float sum = *slots[0] + total / static_cast<float>(count);
  *slots[0] = sum;
  const float rate = c.rate / (__builtin_sqrtf(sum) + c.eps);
  for (i = 0; i < count; ++i) values[i] -= rate * effective(c, gradient[i], values[i]);
}

// Adam and AdamW.
void adam(const Coefficients& coefficients, float* __restrict values,
          const float* __restrict gradient, float* const* slots, std::size_t count) {
  const Coefficients c = coefficients;
  float* __restrict means = slots[0];
  float* __restrict squares = slots[1];
  for (std::size_t i = 0; i < count; ++i) {
    const float value = c.shrink * values[i];
    const float g = effective(c, gradient[i], value);
    const float mean = means[i] + c.take_first * (g - means[i]);
    const float square = c.keep_second * squares[i] + c.take_second * g * g;
    means[i] = mean;
    squares[i] = square;
    values[i] = value - c.rate * (mean / (__builtin_sqrtf(square) + c.eps));
  }
}

template <bool kMomentum, bool kCentered>
void rms_prop_loop(const Coefficients& coefficients, float* __restrict values,
                   const float* __restrict gradient, float* const* slots, std::size_t count) {
  const Coefficients c = coefficients;
  float* __restrict squares = slots[0];
  float* __restrict momenta = kMomentum ? slots[1] : nullptr;
  float* __restrict means = kCentered ? slots[kMomentum ? 2 : 1] : nullptr;
  for (std::size_t i = 0; i < count; ++i) {
    const float g = effective(c, gradient[i], values[i]);
    const float square = c.keep_second * squares[i] + c.take_second * g * g;
    squares[i] = square;
    float variance = square;
    if constexpr (kCentered) {
      const float mean = means[i] + c.take_first * (g - means[i]);
      means[i] = mean;
      variance = square - mean * mean;
    }
    float step = g / (__builtin_sqrtf(variance) + c.eps);
    if constexpr (kMomentum) {
      step = c.momentum * momenta[i] + step;
      momenta[i] = step;
    }
    values[i] -= c.rate * step;
  }
}

void rms_prop(const Coefficients& c, float* values, const float* gradient, float* const* slots,
              std::size_t count) {
  if (c.momentum != 0) {
    (c.centered ? rms_prop_loop<true, true> : rms_prop_loop<true, false>)(c, values, gradient,
                                                                          slots, count);
  } else {
    (c.centered ? rms_prop_loop<false, true> : rms_prop_loop<false, false>)(c, values, gradient,
                                                                            slots, count);
  }
}

void add(float* __restrict dst, const float* __restrict src, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dst[i] += src[i];
}

// --- narrow storage ---------------------------------------------------------------------------

void widen_bfloat16(float* __restrict dst, const std::byte* __restrict row, std::size_t count) {
  const auto* src = reinterpret_cast<const std::uint16_t*>(row);
  for (std::size_t i = 0; i < count; ++i) dst[i] = float_of(std::uint32_t{src[i]} << 16);
}

void narrow_bfloat16(std::byte* __restrict row, const float* __restrict src, std::size_t count) {
  auto* dst = reinterpret_cast<std::uint16_t*>(row);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t u = bits_of(src[i]);
    const std::uint32_t rounded = (u + 0x7FFFU + (u >> 16 & 1U)) >> 16;
    const bool is_nan = (u & 0x7FFFFFFFU) > 0x7F800000U;
    dst[i] = static_cast<std::uint16_t>(is_nan ? (u >> 16 | 0x40U) : rounded);
  }
}

void widen_int8(float* __restrict dst, const std::byte* __restrict row, std::size_t count) {
  const auto* src = reinterpret_cast<const std::int8_t*>(row + sizeof(float));
  float scale;
  __builtin_memcpy(&scale, row, sizeof(float));
  for (std::size_t i = 0; i < count; ++i) dst[i] = static_cast<float>(src[i]) * scale;
}

// Returns the scale for the values, such that the largest magnitude is 127 × scale: NaN if a
// magnitude is not finite, 0 if the largest is too small for a scale. The scale is rounded up to 16
// significant bits: no value exceeds 127 × scale, which is exact, and widened values narrow to the
// same bytes.
inline float int8_scale(const float* __restrict src, std::size_t count) {
  std::uint32_t largest = 0;  // magnitudes are ordered like their bits
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = bits_of(src[i]) & 0x7FFFFFFFU;
    largest = magnitude > largest ? magnitude : largest;
  }
  constexpr float kSmallestNormal = 0x1p-126F;
  if (largest >= 0x7F800000U) return float_of(0x7FC00000U);
  if (float_of(largest) < 128 * kSmallestNormal) return 0;
  const float exact = float_of(largest) / 127.0F;
  return float_of((bits_of(exact) + 0xFFU) & ~0xFFU);
}

void narrow_int8(std::byte* __restrict row, const float* __restrict src, std::size_t count) {
  auto* dst = reinterpret_cast<std::int8_t*>(row + sizeof(float));
  const float scale = int8_scale(src, count);
  __builtin_memset(row + (count + 3) / 4 * 4, 0, 4);  // the last bytes may be no values
  __builtin_memcpy(row, &scale, sizeof(float));
  if (!(scale > 0)) {
    __builtin_memset(dst, 0, count);
    return;
  }
  // Adding and subtracting 1.5 × 2²³ rounds to an integer, ties to even.
  constexpr float kRound = 12582912.0F;
  for (std::size_t i = 0; i < count; ++i) {
    dst[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(src[i] / scale + kRound - kRound));
  }
}

// --- narrow messages --------------------------------------------------------------------------

// A half has 10 mantissa bits and exponents from -14 to 15; a float has 23 and -126 to 127.
void widen_float16(float* __restrict dst, const std::byte* __restrict row, std::size_t count) {
  const auto* src = reinterpret_cast<const std::uint16_t*>(row);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t sign = (src[i] & 0x8000U) << 16;
    const std::uint32_t magnitude = src[i] & 0x7FFFU;
    // A multiplication rebases the exponent, also of subnormals.
    const float finite = float_of(magnitude << 13) * 0x1p112F;
    const std::uint32_t special = magnitude << 13 | 0x7F800000U;
    dst[i] = float_of((magnitude < 0x7C00U ? bits_of(finite) : special) | sign);
  }
}

void narrow_float16(std::byte* __restrict row, const float* __restrict src, std::size_t count) {
  auto* dst = reinterpret_cast<std::uint16_t*>(row);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t sign = bits_of(src[i]) >> 16 & 0x8000U;
    const std::uint32_t u = bits_of(src[i]) & 0x7FFFFFFFU;
    const std::uint32_t normal = (u + 0xFFFU + (u >> 13 & 1U) - (112U << 23)) >> 13;
    // A half's smallest step is the step of floats from ½ to 1, so the addition rounds.
    const std::uint32_t subnormal = bits_of(float_of(u) + 0.5F) - 0x3F000000U;
    const std::uint32_t finite = u < 0x38800000U ? subnormal : normal;
    const std::uint32_t special = u > 0x7F800000U ? 0x7E00U : 0x7C00U;
    dst[i] = static_cast<std::uint16_t>((u < 0x47800000U ? finite : special) | sign);
  }
}

std::size_t count_nonfinite(const float* __restrict src, std::size_t count) {
  std::size_t found = 0;
  while (count != 0) {
    const auto part = static_cast<std::uint32_t>(count < 65536 ? count : 65536);
    std::uint32_t here = 0;
    for (std::uint32_t i = 0; i < part; ++i) {
      here += (bits_of(src[i]) & 0x7F800000U) == 0x7F800000U ? 1U : 0U;
    }
    found += here;
    src += part;
    count -= part;
  }
  return found;
}

// --- initial values ---------------------------------------------------------------------------

// The finalizer of MurmurHash3 (Appleby, public domain).
inline std::uint32_t scramble(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x85EBCA6BU;
  x = (x ^ x >> 13) * 0xC2B2AE35U;
  return x ^ x >> 16;
}
inline std::uint32_t random_bits(std::uint64_t key, std::uint32_t i) {
  return scramble(scramble(static_cast<std::uint32_t>(key) + i * 0x9E3779B9U) ^
                  static_cast<std::uint32_t>(key >> 32));
}

// Returns a number in [0, 1), in steps of 2⁻²⁴. Vectors convert signed integers faster.
inline float random_unit(std::uint64_t key, std::uint32_t i) {
  return static_cast<float>(static_cast<std::int32_t>(random_bits(key, i) >> 8)) * 0x1p-24F;
}

void uniform(float* __restrict dst, std::size_t count, std::uint64_t key, float low, float high) {
  const float width = high - low;
  const auto end = static_cast<std::uint32_t>(count);  // a counter that cannot wrap around
  for (std::uint32_t i = 0; i < end; ++i) dst[i] = low + width * random_unit(key, i);
}

// Computes ln x for 0 < x ≤ 1, accurate to 1e-7. With x = 2ᵉ·m and m from √½ to √2, ln m = 2 artanh
// s for s = (m-1)/(m+1), computed by its series.
inline float natural_log(float x) {
  constexpr std::uint32_t kRootHalf = 0x3F3504F3U;
  const std::uint32_t shifted = bits_of(x) - kRootHalf;
  const auto exponent = static_cast<float>(static_cast<std::int32_t>(shifted) >> 23);
  const float m = float_of((shifted & 0x7FFFFFU) + kRootHalf);
  const float s = (m - 1) / (m + 1);
  const float t = s * s;
  const float series =
      2 * s * (1 + t * (1.0F / 3 + t * (1.0F / 5 + t * (1.0F / 7 + t * (1.0F / 9)))));
  return exponent * 0.69314718F + series;
}

// Computes cos(2πx) for x from 0 to 1, accurate to 3e-7, as 2 sin²(π(x - ½)) - 1 with the sine's
// series.
inline float cosine_of_turns(float x) {
  const float y = 3.14159265F * (x - 0.5F);
  const float t = y * y;
  // 1/3!, 1/5!, …
  constexpr float k3 = 1.0F / 6, k5 = 1.0F / 120, k7 = 1.0F / 5040, k9 = 1.0F / 362880;
  constexpr float k11 = 1.0F / 39916800, k13 = 1.0F / 6227020800;
  const float sine = y * (1 - t * (k3 - t * (k5 - t * (k7 - t * (k9 - t * (k11 - t * k13))))));
  return 2 * sine * sine - 1;
}

// The Box-Muller transform, with two uniform numbers per result.
void normal(float* __restrict dst, std::size_t count, std::uint64_t key, float mean,
            float deviation) {
  const auto end = static_cast<std::uint32_t>(count);
  for (std::uint32_t i = 0; i < end; ++i) {
    const float above_zero = random_unit(key, 2 * i) + 0x1p-24F;
    const float radius = __builtin_sqrtf(-2 * natural_log(above_zero));
    dst[i] = mean + deviation * (radius * cosine_of_turns(random_unit(key, 2 * i + 1)));
  }
}

}  // namespace

const Kernels kKernels{
    {sgd, adagrad, adam, adam, rms_prop, row_wise_adagrad},
    add,
    {{widen_bfloat16, narrow_bfloat16}, {widen_float16, narrow_float16}, {widen_int8, narrow_int8}},
    count_nonfinite,
    uniform,
    normal};

}  // namespace fastdist::table::FASTDIST_ISA
