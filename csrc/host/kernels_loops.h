// The loops behind kernels.h, written with the compiler's vector types. Each kernels_<set>.cpp
// defines FASTDIST_ISA and FASTDIST_VECTOR_BYTES and includes this file under its own compiler
// flags. Everything has internal linkage and no standard templates are called, so that the linker
// cannot pick a function compiled for a wide instruction set for another file.

#if !defined(FASTDIST_ISA) || !defined(FASTDIST_VECTOR_BYTES)
#error "include this file only from kernels_<instruction set>.cpp"
#endif

#include <cstddef>
#include <cstdint>

#include "host/kernels_formats.h"
#include "host/kernels_table.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastdist::host::FASTDIST_ISA {
namespace {

constexpr std::size_t kUnroll = 4;

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

// --- loops --------------------------------------------------------------------------------------

// kSources is the number of sources if known at compile time, otherwise 0.
template <class Format, class Operation, class Finish, std::size_t kSources>
void reduce_loop(std::byte* dst_bytes, std::byte* also_bytes, const std::byte* const* source_bytes,
                 std::size_t n_sources, std::size_t count) {
  using T = typename Format::Storage;
  using V = decltype(Format::read_vector(nullptr));
  constexpr std::size_t kLanes = kVector / sizeof(typename Format::Value);
  const std::size_t n = kSources != 0 ? kSources : n_sources;
  T* dst = reinterpret_cast<T*>(dst_bytes);
  T* also = reinterpret_cast<T*>(also_bytes);
  const T* const* sources = reinterpret_cast<const T* const*>(source_bytes);

  std::size_t i = 0;
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes) {
    V acc[kUnroll];
    for (std::size_t u = 0; u < kUnroll; ++u)
      acc[u] = Format::read_vector(sources[0] + i + u * kLanes);
    for (std::size_t s = 1; s < n; ++s) {
      for (std::size_t u = 0; u < kUnroll; ++u) {
        acc[u] = Operation::apply(acc[u], Format::read_vector(sources[s] + i + u * kLanes));
      }
    }
    for (std::size_t u = 0; u < kUnroll; ++u) {
      acc[u] = Finish::finish(acc[u], n);
      Format::write_vector(dst + i + u * kLanes, acc[u]);
      if (also != nullptr) Format::write_vector(also + i + u * kLanes, acc[u]);
    }
  }
  for (; i < count; ++i) {
    using Value = typename Format::Value;
    auto acc = Format::read(sources[0] + i);
    for (std::size_t s = 1; s < n; ++s) {
      acc = static_cast<Value>(Operation::apply(acc, Format::read(sources[s] + i)));
    }
    acc = static_cast<Value>(Finish::finish(acc, n));
    Format::write(dst + i, acc);
    if (also != nullptr) Format::write(also + i, acc);
  }
}

template <class Format, class Operation, class Finish = Keep>
void reduce_any(std::byte* dst, std::byte* also, const std::byte* const* sources, std::size_t n,
                std::size_t count) {
  // Most reductions are sums of two; loops for two of all operations would double the build time.
  if constexpr (kIsSame<Operation, Sum>) {
    if (n == 2) return reduce_loop<Format, Operation, Finish, 2>(dst, also, sources, n, count);
  }
  reduce_loop<Format, Operation, Finish, 0>(dst, also, sources, n, count);
}

// Sums and means of complex numbers are computed on their parts.
template <class T, class Operation, class Finish = Keep>
void reduce_parts(std::byte* dst, std::byte* also, const std::byte* const* sources, std::size_t n,
                  std::size_t count) {
  reduce_any<Native<T>, Operation, Finish>(dst, also, sources, n, 2 * count);
}

template <class T>
void multiply_complex(std::byte* dst, std::byte* also, const std::byte* const* sources,
                      std::size_t n, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = i * sizeof(Complex<T>);
    auto acc = load<Complex<T>>(sources[0] + at);
    for (std::size_t s = 1; s < n; ++s) {
      acc = Prod::apply(acc, load<Complex<T>>(sources[s] + at));
    }
    store(dst + at, acc);
    if (also != nullptr) store(also + at, acc);
  }
}

template <class Format>
ReduceFunction floating(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_any<Format, Sum>;
    case ReduceOp::kMean:
      return reduce_any<Format, Sum, Divide>;
    case ReduceOp::kProd:
      return reduce_any<Format, Prod>;
    case ReduceOp::kMin:
      return reduce_any<Format, Min>;
    case ReduceOp::kMax:
      return reduce_any<Format, Max>;
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      return nullptr;
  }
  return nullptr;
}

// `Ordered` is the element type; operations that ignore the sign use `Unsigned`.
template <class Ordered, class Unsigned>
ReduceFunction integral(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_any<Native<Unsigned>, Sum>;
    case ReduceOp::kProd:
      return reduce_any<Native<Unsigned>, Prod>;
    case ReduceOp::kMin:
      return reduce_any<Native<Ordered>, Min>;
    case ReduceOp::kMax:
      return reduce_any<Native<Ordered>, Max>;
    case ReduceOp::kAnd:
      return reduce_any<Native<Unsigned>, And>;
    case ReduceOp::kOr:
      return reduce_any<Native<Unsigned>, Or>;
    case ReduceOp::kXor:
      return reduce_any<Native<Unsigned>, Xor>;
    case ReduceOp::kMean:
      return nullptr;
  }
  return nullptr;
}

// As in numpy, the sum of bools is their or, and the product their and.
ReduceFunction boolean(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kOr:
      return reduce_any<Native<std::uint8_t>, Or>;
    case ReduceOp::kProd:
    case ReduceOp::kMin:
    case ReduceOp::kAnd:
      return reduce_any<Native<std::uint8_t>, And>;
    case ReduceOp::kXor:
      return reduce_any<Native<std::uint8_t>, Xor>;
    case ReduceOp::kMean:
      return nullptr;
  }
  return nullptr;
}

template <class T>
ReduceFunction complex(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_parts<T, Sum>;
    case ReduceOp::kMean:
      return reduce_parts<T, Sum, Divide>;
    case ReduceOp::kProd:
      return multiply_complex<T>;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      return nullptr;
  }
  return nullptr;
}

ReduceFunction find_reduce(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kBool:
      return boolean(op);
    case DType::kInt8:
      return integral<std::int8_t, std::uint8_t>(op);
    case DType::kInt16:
      return integral<std::int16_t, std::uint16_t>(op);
    case DType::kInt32:
      return integral<std::int32_t, std::uint32_t>(op);
    case DType::kInt64:
      return integral<std::int64_t, std::uint64_t>(op);
    case DType::kUInt8:
      return integral<std::uint8_t, std::uint8_t>(op);
    case DType::kUInt16:
      return integral<std::uint16_t, std::uint16_t>(op);
    case DType::kUInt32:
      return integral<std::uint32_t, std::uint32_t>(op);
    case DType::kUInt64:
      return integral<std::uint64_t, std::uint64_t>(op);
    case DType::kFloat16:
      return floating<Float16>(op);
    case DType::kBFloat16:
      return floating<BFloat16>(op);
    case DType::kFloat8E4M3FN:
      return floating<Float8E4M3FN>(op);
    case DType::kFloat8E5M2:
      return floating<Float8E5M2>(op);
    case DType::kFloat32:
      return floating<Native<float>>(op);
    case DType::kFloat64:
      return floating<Native<double>>(op);
    case DType::kComplex64:
      return complex<float>(op);
    case DType::kComplex128:
      return complex<double>(op);
  }
  return nullptr;
}

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

void copy(std::byte* dst, const std::byte* src, std::size_t bytes, bool stream) {
  if (stream) {
    copy_loop<true>(dst, src, bytes);
  } else {
    copy_loop<false>(dst, src, bytes);
  }
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

template <class From>
ConvertLoop convert_from(DType dst) {
  switch (dst) {
    case DType::kFloat16:
      return convert_loop<Float16, From>;
    case DType::kBFloat16:
      return convert_loop<BFloat16, From>;
    case DType::kFloat8E4M3FN:
      return convert_loop<Float8E4M3FN, From>;
    case DType::kFloat8E5M2:
      return convert_loop<Float8E5M2, From>;
    case DType::kFloat32:
      return convert_loop<Native<float>, From>;
    case DType::kFloat64:
      return convert_loop<Native<double>, From>;
    case DType::kBool:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt8:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex64:
    case DType::kComplex128:
      return nullptr;
  }
  return nullptr;
}

ConvertLoop find_convert(DType dst, DType src) {
  switch (src) {
    case DType::kFloat16:
      return convert_from<Float16>(dst);
    case DType::kBFloat16:
      return convert_from<BFloat16>(dst);
    case DType::kFloat8E4M3FN:
      return convert_from<Float8E4M3FN>(dst);
    case DType::kFloat8E5M2:
      return convert_from<Float8E5M2>(dst);
    case DType::kFloat32:
      return convert_from<Native<float>>(dst);
    case DType::kFloat64:
      return convert_from<Native<double>>(dst);
    case DType::kBool:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt8:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex64:
    case DType::kComplex128:
      return nullptr;
  }
  return nullptr;
}

void convert(DType dst_dtype, std::byte* dst, DType src_dtype, const std::byte* src,
             std::size_t count, float scale) {
  find_convert(dst_dtype, src_dtype)(dst, src, count, scale);
}

}  // namespace

#define FASTDIST_STRING_(x) #x
#define FASTDIST_STRING(x) FASTDIST_STRING_(x)
extern const Kernels kKernels;
const Kernels kKernels{FASTDIST_STRING(FASTDIST_ISA), find_reduce, copy, convert};
#undef FASTDIST_STRING
#undef FASTDIST_STRING_

}  // namespace fastdist::host::FASTDIST_ISA
