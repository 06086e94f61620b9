// The loops behind kernels.h, written with the compiler's vector types. Each kernels_<set>.cpp
// defines FASTDIST_ISA and FASTDIST_VECTOR_BYTES and includes this file under its own compiler
// flags. Everything has internal linkage and no standard templates are called, so that the linker
// cannot pick a function compiled for a wide instruction set for another file.

#if !defined(FASTDIST_ISA) || !defined(FASTDIST_VECTOR_BYTES)
#error "include this file only from kernels_<instruction set>.cpp"
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "host/kernels_formats.h"
#include "host/kernels_table.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastdist::host::FASTDIST_ISA {
namespace {

constexpr std::size_t kUnroll = 4;
constexpr std::size_t kMostPending = 32;  // levels of the tree over any number of sources

// --- loops --------------------------------------------------------------------------------------

template <class Operation, std::size_t kWidth, class V>
void apply(V (&to)[kWidth], const V (&left)[kWidth], const V (&right)[kWidth]) {
  // C++ promotes small integers to int.
  for (std::size_t u = 0; u < kWidth; ++u)
    to[u] = static_cast<V>(Operation::apply(left[u], right[u]));
}

// Ways to reduce kWidth values of each source; `read(s, values)` reads those of source s.

// In any order: the results do not depend on it.
struct InTurn {
  template <class Operation, std::size_t kWidth, class V, class Read>
  static void reduce(V (&values)[kWidth], const Tree& tree, const Read& read) {
    read(0, values);
    for (std::size_t s = 1; s < tree.n_sources; ++s) {
      V next[kWidth];
      read(s, next);
      apply<Operation>(values, values, next);
    }
  }
};

// By the complete tree over kSources sources.
template <std::size_t kSources>
struct Complete {
  static constexpr std::size_t kLeft = kSources <= 2 ? 1 : kSources <= 4 ? 2 : 4;
  template <class Operation, std::size_t kWidth, class V, class Read>
  static void reduce(V (&values)[kWidth], const Tree&, const Read& read) {
    from<Operation>(0, values, read);
  }
  template <class Operation, std::size_t kWidth, class V, class Read>
  static void from(std::size_t s, V (&values)[kWidth], const Read& read) {
    if constexpr (kSources == 1) {
      read(s, values);
    } else {
      V right[kWidth];
      Complete<kLeft>::template from<Operation>(s, values, read);
      Complete<kSources - kLeft>::template from<Operation>(s + kLeft, right, read);
      apply<Operation>(values, values, right);
    }
  }
};

// By any tree.
struct ByGroups {
  template <class Operation, std::size_t kWidth, class V, class Read>
  static void reduce(V (&values)[kWidth], const Tree& tree, const Read& read) {
    V pending[kMostPending][kWidth];  // results that wait for their right sibling
    std::size_t depth = 0;
    std::size_t s = 0;
    for (std::size_t g = 0; g < tree.n_groups; ++g) {
      const Group group = tree.groups[g];
      V next[kWidth];
      if (group.sources == 4) {
        Complete<4>::from<Operation>(s, next, read);
      } else if (group.sources == 2) {
        Complete<2>::from<Operation>(s, next, read);
      } else {
        read(s, next);
      }
      s += group.sources;
      if (group.reductions != 0) {
        apply<Operation>(values, values, next);
        for (int left = group.reductions; left > 1; --left) {
          apply<Operation>(values, pending[--depth], values);
        }
        continue;
      }
      for (std::size_t u = 0; u < kWidth; ++u) {
        if (g != 0) pending[depth][u] = values[u];
        values[u] = next[u];
      }
      if (g != 0) ++depth;
    }
  }
};

// Divides the results by the tree's divisor if kIsMean is true and `is_mean` too.
template <class Way, class Format, class Operation, bool kIsMean = false>
void reduce_loop(std::byte* dst_bytes, std::byte* also_bytes, const std::byte* const* source_bytes,
                 const Tree& tree, std::size_t count, bool is_mean = false) {
  using Value = typename Format::Value;
  using T = typename Format::Storage;
  using V = decltype(Format::read_vector(nullptr));
  constexpr std::size_t kLanes = kVector / sizeof(Value);
  const auto n = static_cast<Value>(tree.divisor);
  T* dst = reinterpret_cast<T*>(dst_bytes);
  T* also = reinterpret_cast<T*>(also_bytes);
  const T* const* sources = reinterpret_cast<const T* const*>(source_bytes);

  std::size_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes) {
    V acc[kUnroll] = {};
    Way::template reduce<Operation>(acc, tree, [&](std::size_t s, V(&to)[kUnroll]) {
      for (std::size_t u = 0; u < kUnroll; ++u) {
        to[u] = Format::read_vector(sources[s] + i + u * kLanes);
      }
    });
    for (std::size_t u = 0; u < kUnroll; ++u) {
      if (kIsMean && is_mean) acc[u] = acc[u] / n;
      Format::write_vector(dst + i + u * kLanes, acc[u]);
      if (also != nullptr) Format::write_vector(also + i + u * kLanes, acc[u]);
    }
  }
  for (; i < count; ++i) {
    Value acc[1] = {};
    Way::template reduce<Operation>(
        acc, tree, [&](std::size_t s, Value(&to)[1]) { to[0] = Format::read(sources[s] + i); });
    if (kIsMean && is_mean) acc[0] = acc[0] / n;
    Format::write(dst + i, acc[0]);
    if (also != nullptr) Format::write(also + i, acc[0]);
  }
}

// Operations on integers and bits, the minimum and the maximum.
template <class Format, class Operation>
void reduce_exact(std::byte* dst, std::byte* also, const std::byte* const* sources,
                  const Tree& tree, std::size_t count) {
  // Most reductions are sums of two; loops for two of all operations would double the build time.
  if constexpr (std::is_same_v<Operation, Sum>) {
    if (tree.n_sources == 2) {
      return reduce_loop<Complete<2>, Format, Operation>(dst, also, sources, tree, count);
    }
  }
  reduce_loop<InTurn, Format, Operation>(dst, also, sources, tree, count);
}

// Sums and means that are rounded; those of complex numbers are computed on their parts.
template <class Format>
void add(std::byte* dst, std::byte* also, const std::byte* const* sources, const Tree& tree,
         std::size_t count, bool is_mean) {
  const auto by = [&]<class Way>(Way) {
    reduce_loop<Way, Format, Sum, true>(dst, also, sources, tree, count, is_mean);
  };
  const std::size_t n = tree.n_sources;
  if constexpr (sizeof(typename Format::Storage) > 1) {  // each loop takes time to build
    if (n == 2) return by(Complete<2>{});
    if (n == 3 && tree.groups[0].sources == 2) return by(Complete<3>{});
    if (n == 4 && tree.n_groups == 1) return by(Complete<4>{});
    if (n == 8 && tree.n_groups == 2) return by(Complete<8>{});
  }
  by(ByGroups{});
}

template <class Format, std::size_t kParts, bool kIsMean>
void add(std::byte* dst, std::byte* also, const std::byte* const* sources, const Tree& tree,
         std::size_t count) {
  add<Format>(dst, also, sources, tree, kParts * count, kIsMean);
}

template <class Format>
void multiply(std::byte* dst, std::byte* also, const std::byte* const* sources, const Tree& tree,
              std::size_t count) {
  reduce_loop<ByGroups, Format, Prod>(dst, also, sources, tree, count);
}

template <class T>
void multiply_complex(std::byte* dst, std::byte* also, const std::byte* const* sources,
                      const Tree& tree, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = i * sizeof(Complex<T>);
    Complex<T> acc[1] = {};
    ByGroups::reduce<Prod>(acc, tree, [&](std::size_t s, Complex<T>(&to)[1]) {
      to[0] = load<Complex<T>>(sources[s] + at);
    });
    store(dst + at, acc[0]);
    if (also != nullptr) store(also + at, acc[0]);
  }
}

// The tables have an entry for each enumerator, in order.
static_assert(kDTypeCount == 17 && kReduceOpCount == 8);

template <class Format>
constexpr ReduceFunction kFloating[kReduceOpCount] = {
    add<Format, 1, false>,      // sum
    add<Format, 1, true>,       // mean
    multiply<Format>,           // prod
    reduce_exact<Format, Min>,  // min
    reduce_exact<Format, Max>,  // max
};

// `Ordered` is the element type; operations that ignore the sign use `Unsigned`.
template <class Ordered, class Unsigned>
constexpr ReduceFunction kIntegral[kReduceOpCount] = {
    reduce_exact<Native<Unsigned>, Sum>,   // sum
    nullptr,                               // mean
    reduce_exact<Native<Unsigned>, Prod>,  // prod
    reduce_exact<Native<Ordered>, Min>,    // min
    reduce_exact<Native<Ordered>, Max>,    // max
    reduce_exact<Native<Unsigned>, And>,   // and
    reduce_exact<Native<Unsigned>, Or>,    // or
    reduce_exact<Native<Unsigned>, Xor>,   // xor
};

// As in numpy, the sum of bools is their or, and the product their and.
constexpr ReduceFunction kBoolean[kReduceOpCount] = {
    reduce_exact<Native<std::uint8_t>, Or>,   // sum
    nullptr,                                  // mean
    reduce_exact<Native<std::uint8_t>, And>,  // prod
    reduce_exact<Native<std::uint8_t>, And>,  // min
    reduce_exact<Native<std::uint8_t>, Or>,   // max
    reduce_exact<Native<std::uint8_t>, And>,  // and
    reduce_exact<Native<std::uint8_t>, Or>,   // or
    reduce_exact<Native<std::uint8_t>, Xor>,  // xor
};

template <class T>
constexpr ReduceFunction kComplex[kReduceOpCount] = {
    add<Native<T>, 2, false>,  // sum
    add<Native<T>, 2, true>,   // mean
    multiply_complex<T>,       // prod
};

constexpr const ReduceFunction* kReductions[kDTypeCount] = {
    kBoolean,
    kIntegral<std::int8_t, std::uint8_t>,
    kIntegral<std::int16_t, std::uint16_t>,
    kIntegral<std::int32_t, std::uint32_t>,
    kIntegral<std::int64_t, std::uint64_t>,
    kIntegral<std::uint8_t, std::uint8_t>,
    kIntegral<std::uint16_t, std::uint16_t>,
    kIntegral<std::uint32_t, std::uint32_t>,
    kIntegral<std::uint64_t, std::uint64_t>,
    kFloating<Float16>,
    kFloating<BFloat16>,
    kFloating<Float8E4M3FN>,
    kFloating<Float8E5M2>,
    kFloating<Native<float>>,
    kFloating<Native<double>>,
    kComplex<float>,
    kComplex<double>,
};

#if FASTDIST_VECTOR_BYTES == 64
inline void store_past_caches(std::byte* p, const Vector<float>& v) {
  _mm512_stream_ps(reinterpret_cast<float*>(p), bits<__m512>(v));
}
#elif FASTDIST_VECTOR_BYTES == 32
inline void store_past_caches(std::byte* p, const Vector<float>& v) {
  _mm256_stream_ps(reinterpret_cast<float*>(p), bits<__m256>(v));
}
#elif defined(__x86_64__)
inline void store_past_caches(std::byte* p, const Vector<float>& v) {
  _mm_stream_ps(reinterpret_cast<float*>(p), bits<__m128>(v));
}
#else
inline void store_past_caches(std::byte* p, const Vector<float>& v) { store(p, v); }
#endif

template <bool kPastCaches>
void copy_loop(std::byte* dst, const std::byte* src, std::size_t bytes) {
  constexpr std::size_t kStep = 4 * 64;
  // Stores that bypass the caches must be aligned, and pay off only for whole lines.
  const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(dst) % 64) % 64;
  if (bytes < head + kStep) {
    __builtin_memcpy(dst, src, bytes);
    return;
  }
  __builtin_memcpy(dst, src, head);
  std::size_t i = head;
  for (; i + kStep <= bytes; i += kStep) {
    Vector<float> v[kStep / kVector];
    for (std::size_t u = 0; u < kStep / kVector; ++u) {
      v[u] = load<Vector<float>>(src + i + u * kVector);
    }
    for (std::size_t u = 0; u < kStep / kVector; ++u) {
      if constexpr (kPastCaches) {
        store_past_caches(dst + i + u * kVector, v[u]);
      } else {
        store(dst + i + u * kVector, v[u]);
      }
    }
  }
  __builtin_memcpy(dst + i, src + i, bytes - i);
}

// --- conversion ---------------------------------------------------------------------------------

// Rounds a double to float such that rounding the result to a narrower format gives the same value
// as rounding once: an inexact result gets an odd last bit.
inline float round_to_odd(double v) {
  const auto f = static_cast<float>(v);
  const auto u = bits<std::uint32_t>(f);
  const auto back = static_cast<double>(f);
  if (back == v || v != v || (u & 1U) != 0) return f;
  const bool is_above = v > 0 ? back > v : back < v;  // in magnitude
  return bits<float>(is_above ? u - 1 : u + 1);
}

template <class To, class From>
void convert_loop(std::byte* dst_bytes, const std::byte* src_bytes, std::size_t count,
                  float scale) {
  auto* dst = reinterpret_cast<typename To::Storage*>(dst_bytes);
  const auto* src = reinterpret_cast<const typename From::Storage*>(src_bytes);
  std::size_t i = 0;
  if constexpr (sizeof(typename To::Value) == 4 && sizeof(typename From::Value) == 4) {
    constexpr std::size_t kLanes = kVector / sizeof(float);
    for (; i + kLanes <= count; i += kLanes) {
      To::write_vector(dst + i, From::read_vector(src + i) * scale);
    }
  }
  for (; i < count; ++i) {
    const auto value = From::read(src + i) * static_cast<typename From::Value>(scale);
    if constexpr (sizeof(typename From::Value) == 8 && sizeof(typename To::Storage) < 4) {
      To::write(dst + i, round_to_odd(value));
    } else {
      To::write(dst + i, static_cast<typename To::Value>(value));
    }
  }
}

using ConvertLoop = void (*)(std::byte*, const std::byte*, std::size_t, float);

// To each floating dtype, in order.
template <class From>
constexpr ConvertLoop kConvertFrom[] = {
    convert_loop<Float16, From>,       convert_loop<BFloat16, From>,
    convert_loop<Float8E4M3FN, From>,  convert_loop<Float8E5M2, From>,
    convert_loop<Native<float>, From>, convert_loop<Native<double>, From>,
};
constexpr const ConvertLoop* kConversions[] = {
    kConvertFrom<Float16>,    kConvertFrom<BFloat16>,      kConvertFrom<Float8E4M3FN>,
    kConvertFrom<Float8E5M2>, kConvertFrom<Native<float>>, kConvertFrom<Native<double>>,
};

void convert(DType dst_dtype, std::byte* dst, DType src_dtype, const std::byte* src,
             std::size_t count, float scale) {
  const auto at = [](DType d) { return static_cast<int>(d) - static_cast<int>(DType::kFloat16); };
  kConversions[at(src_dtype)][at(dst_dtype)](dst, src, count, scale);
}

}  // namespace

#define FASTDIST_STRING_(x) #x
#define FASTDIST_STRING(x) FASTDIST_STRING_(x)
const Kernels kKernels{FASTDIST_STRING(FASTDIST_ISA), kReductions, copy_loop<false>,
                       copy_loop<true>, convert};
#undef FASTDIST_STRING
#undef FASTDIST_STRING_

}  // namespace fastdist::host::FASTDIST_ISA
