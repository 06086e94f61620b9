// Element formats and operations for the loops of kernels_loops.h, on single values and on vectors.
// Included only by kernels_loops.h, for one instruction set at a time; everything has internal
// linkage.

#include <cstddef>
#include <cstdint>

namespace fastdist::host::FASTDIST_ISA {
namespace {

constexpr std::size_t kVector = FASTDIST_VECTOR_BYTES;

template <class T, std::size_t Bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Bytes)));
};
template <class T, std::size_t Bytes = kVector>
using Vector = typename VectorOf<T, Bytes>::type;

template <class V>
inline V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
inline void store(void* p, const auto& v) { __builtin_memcpy(p, &v, sizeof(v)); }
template <class To, class From>
inline To bits(const From& from) {
  return __builtin_bit_cast(To, from);
}

// --- element formats: conversion between elements in memory and values to compute with --------

template <class T>
struct Native {
  using Storage = T;
  using Value = T;
  static T read(const T* p) { return load<T>(p); }  // at any address
  static void write(T* p, T v) { store(p, v); }
  static Vector<T> read_vector(const T* p) { return load<Vector<T>>(p); }
  static void write_vector(T* p, Vector<T> v) { store(p, v); }
};

using Floats = Vector<float>;
using Words = Vector<std::uint32_t>;
using Halves = Vector<std::uint16_t, kVector / 2>;

// The 32-bit codecs below work on a single uint32_t and float and on vectors of them. `U` is the
// unsigned type and `F` the float type; a comparison of F gives a mask for `select`.
inline std::uint32_t select(bool c, std::uint32_t a, std::uint32_t b) { return c ? a : b; }
inline Words select(auto c, Words a, Words b) { return c ? a : b; }

struct BFloat16Codec {
  template <class F, class U>
  static F widen(U u) {
    return bits<F>(U(u << 16));
  }
  template <class U, class F>
  static U narrow(F f) {
    const U u = bits<U>(f);
    const U rounded = (u + 0x7FFFU + (u >> 16 & 1U)) >> 16;
    return select(f != f, U(u >> 16 | 0x40U), rounded);
  }
};

struct Float16Codec {
  template <class F, class U>
  static F widen(U u) {
    const U sign = (u & 0x8000U) << 16;
    const U magnitude = (u & 0x7FFFU) << 13;
    // Exact, also for subnormals: a multiplication rebases the exponent.
    const U finite = bits<U>(F(bits<F>(magnitude) * 0x1p112F));
    return bits<F>(U(sign | select((u & 0x7FFFU) >= 0x7C00U, U(magnitude | 0x7F800000U), finite)));
  }
  template <class U, class F>
  static U narrow(F f) {
    const U u = bits<U>(f);
    const U sign = u >> 16 & 0x8000U;
    const U magnitude = u & 0x7FFFFFFFU;
    const U normal = (magnitude - (112U << 23) + 0xFFFU + (magnitude >> 13 & 1U)) >> 13;
    // Adding 0.5 aligns the bits of a subnormal and rounds them to nearest even.
    const U subnormal = bits<U>(F(bits<F>(magnitude) + 0.5F)) - 0x3F000000U;
    const U finite = select(magnitude < (113U << 23), subnormal, normal);
    const U special =
        select(magnitude > 0x7F800000U, U(magnitude >> 13 | 0x7E00U), U(sign * 0U + 0x7C00U));
    return sign | select(magnitude >= 0x477FF000U, special, finite);
  }
};

template <class Codec>
struct HalfPrecision {
  using Storage = std::uint16_t;
  using Value = float;
  static float read(const Storage* p) {
    return Codec::template widen<float>(std::uint32_t{load<Storage>(p)});
  }
  static void write(Storage* p, float v) {
    store(p, static_cast<Storage>(Codec::template narrow<std::uint32_t>(v)));
  }
  static Floats read_vector(const Storage* p) {
    return Codec::template widen<Floats>(__builtin_convertvector(load<Halves>(p), Words));
  }
  static void write_vector(Storage* p, Floats v) {
    store(p, __builtin_convertvector(Codec::template narrow<Words>(v), Halves));
  }
};

// Eight-bit floats. E4M3FN has no infinity: values that are too large become NaN, as in the OCP
// format.
template <int kExponentBits, int kMantissaBits, bool kHasInfinity>
struct Float8 {
  using Storage = std::uint8_t;
  using Value = float;
  static constexpr std::uint32_t kBias = (1U << (kExponentBits - 1)) - 1;
  static constexpr std::uint32_t kNaN = kHasInfinity ? 0x7EU : 0x7FU;
  static constexpr std::uint32_t kLargest = kHasInfinity ? 0x7BU : 0x7EU;
  static constexpr std::uint32_t kTooLarge = kHasInfinity ? 0x7CU : 0x7FU;

  static float read(const Storage* p) {
    const std::uint32_t sign = (*p & 0x80U) << 24;
    const std::uint32_t magnitude = *p & 0x7FU;
    if (magnitude > kLargest) {
      const bool infinite = kHasInfinity && magnitude == kTooLarge;
      return bits<float>(sign | (infinite ? 0x7F800000U : 0x7FC00000U));
    }
    const std::uint32_t rebase = (254U - kBias) << 23;  // 2^(127 - kBias)
    const auto value = bits<float>(magnitude << (23 - kMantissaBits)) * bits<float>(rebase);
    return bits<float>(sign | bits<std::uint32_t>(value));
  }
  static void write(Storage* p, float v) {
    const auto u = bits<std::uint32_t>(v);
    const std::uint32_t sign = u >> 24 & 0x80U;
    std::uint32_t magnitude = u & 0x7FFFFFFFU;
    std::uint32_t code;
    constexpr std::uint32_t kShift = 23 - kMantissaBits;
    constexpr std::uint32_t kSmallestNormal = (127U - kBias + 1) << 23;
    if (magnitude > 0x7F800000U) {
      code = kNaN;
    } else if (magnitude < kSmallestNormal) {
      // A power of two whose last bit equals one unit of the subnormals.
      constexpr std::uint32_t kMagic = (127U - kBias + 1 + kShift) << 23;
      code = bits<std::uint32_t>(bits<float>(magnitude) + bits<float>(kMagic)) - kMagic;
    } else {
      magnitude -= (127U - kBias) << 23;
      code = (magnitude + (1U << (kShift - 1)) - 1 + (magnitude >> kShift & 1U)) >> kShift;
      if (code > kLargest) code = kTooLarge;
    }
    *p = static_cast<Storage>(sign | code);
  }
  static Floats read_vector(const Storage* p) {
    Floats v;
    for (std::size_t i = 0; i < kVector / sizeof(float); ++i) v[i] = read(p + i);
    return v;
  }
  static void write_vector(Storage* p, Floats v) {
    for (std::size_t i = 0; i < kVector / sizeof(float); ++i) write(p + i, v[i]);
  }
};

using Float16 = HalfPrecision<Float16Codec>;
using BFloat16 = HalfPrecision<BFloat16Codec>;
using Float8E4M3FN = Float8<4, 3, false>;
using Float8E5M2 = Float8<5, 2, true>;

template <class T>
struct Complex {
  T re, im;
};

// --- operations on single values and on vectors -----------------------------------------------
// Those of small integers give an int, which the caller casts.

struct Sum {
  static auto apply(const auto& a, const auto& b) { return a + b; }
};
struct Prod {
  static auto apply(const auto& a, const auto& b) { return a * b; }
  // The product of two uint16_t promoted to int would overflow.
  static std::uint16_t apply(const std::uint16_t& a, const std::uint16_t& b) {
    return static_cast<std::uint16_t>(std::uint32_t{a} * b);
  }
  template <class T>
  static Complex<T> apply(const Complex<T>& a, const Complex<T>& b) {
    T re = a.re * b.re - a.im * b.im;
#if defined(__x86_64__)
    // gcc 12 would compute both parts by fused operations, in spite of -ffp-contract=off.
    asm("" : "+x"(re));
#endif
    return {re, a.re * b.im + a.im * b.re};
  }
};
// A NaN in any source gives NaN, as in numpy.minimum: `a != a` keeps a NaN in a; a NaN in b fails
// the comparison, so b is chosen.
struct Min {
  static auto apply(const auto& a, const auto& b) { return (a < b) | (a != a) ? a : b; }
};
struct Max {
  static auto apply(const auto& a, const auto& b) { return (a > b) | (a != a) ? a : b; }
};
struct And {
  static auto apply(const auto& a, const auto& b) { return a & b; }
};
struct Or {
  static auto apply(const auto& a, const auto& b) { return a | b; }
};
struct Xor {
  static auto apply(const auto& a, const auto& b) { return a ^ b; }
};

}  // namespace
}  // namespace fastdist::host::FASTDIST_ISA
