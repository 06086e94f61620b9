// The kernels of every supported instruction set, against separately written plain code.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "core/types.h"
#include "host/kernels.h"
#include "host/kernels_table.h"
#include "world.h"

namespace fastdist::test {
namespace {

using host::Groups;
using host::Kernels;

std::vector<const Kernels*> instruction_sets() {
  std::vector<const Kernels*> sets{&host::generic::kKernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    sets.push_back(&host::avx2::kKernels);
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    sets.push_back(&host::avx512::kKernels);
  }
#endif
  return sets;
}

host::ReduceFunction function_of(const Kernels& kernels, DType dtype, ReduceOp op) {
  return kernels.reductions[static_cast<int>(dtype)][static_cast<int>(op)];
}

constexpr DType kNarrow[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3FN,
                             DType::kFloat8E5M2};

bool is_narrow(DType dtype) { return std::find(kNarrow, kNarrow + 4, dtype) != kNarrow + 4; }

// --- the formats, by their definitions ----------------------------------------------------------

struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // otherwise the only NaN has all ones in exponent and mantissa

  [[nodiscard]] int bits() const { return 1 + exponent_bits + mantissa_bits; }
  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] std::uint32_t sign_bit() const { return 1U << (bits() - 1); }
  // The code of the largest finite value; the next code is infinity or NaN.
  [[nodiscard]] std::uint32_t largest() const {
    const std::uint32_t all = sign_bit() - 1;
    return has_infinity ? all - (1U << mantissa_bits) : all - 1;
  }
  // Continues the sequence of numbers beyond the largest code.
  [[nodiscard]] double magnitude(std::uint32_t code) const {
    const int exponent = static_cast<int>(code >> mantissa_bits);
    const double mantissa = code & ((1U << mantissa_bits) - 1);
    const double one = 1U << mantissa_bits;
    if (exponent == 0) return std::ldexp(mantissa / one, 1 - bias());
    return std::ldexp(1.0 + mantissa / one, exponent - bias());
  }
  [[nodiscard]] double value(std::uint32_t code) const {
    const std::uint32_t absolute = code & (sign_bit() - 1);
    double v = magnitude(absolute);
    if (absolute > largest()) {
      const bool infinite = has_infinity && absolute == largest() + 1;
      v = infinite ? std::numeric_limits<double>::infinity()
                   : std::numeric_limits<double>::quiet_NaN();
    }
    return (code & sign_bit()) != 0 ? -v : v;
  }
};

Format format_of(DType dtype) {
  if (dtype == DType::kFloat16) return {5, 10, true};
  if (dtype == DType::kBFloat16) return {8, 7, true};
  if (dtype == DType::kFloat8E4M3FN) return {4, 3, false};
  return {5, 2, true};
}

// Finds the nearest code by search; ties go to the even code, and values beyond the last halfway
// point become infinity or NaN.
class Narrower {
 public:
  explicit Narrower(DType dtype) : format_(format_of(dtype)) {
    for (std::uint32_t code = 0; code <= format_.largest() + 1; ++code) {
      magnitudes_.push_back(format_.magnitude(code));
    }
  }
  [[nodiscard]] const Format& format() const { return format_; }
  [[nodiscard]] std::uint32_t operator()(double v) const {
    const std::uint32_t sign = std::signbit(v) ? format_.sign_bit() : 0;
    if (std::isnan(v)) return format_.sign_bit() - 1;
    const double m = std::fabs(v);
    if (m >= magnitudes_.back()) return sign | (format_.largest() + 1);
    const auto above = std::upper_bound(magnitudes_.begin(), magnitudes_.end(), m);
    const auto high = static_cast<std::uint32_t>(above - magnitudes_.begin());
    const std::uint32_t low = high - 1;
    const double middle = (magnitudes_[low] + magnitudes_[high]) / 2;  // exact
    if (m == middle) return sign | (low % 2 == 0 ? low : high);
    return sign | (m < middle ? low : high);
  }

 private:
  Format format_;
  std::vector<double> magnitudes_;
};

const Narrower& narrower(DType dtype) {
  static const Narrower all[] = {Narrower(kNarrow[0]), Narrower(kNarrow[1]), Narrower(kNarrow[2]),
                                 Narrower(kNarrow[3])};
  return all[std::find(kNarrow, kNarrow + 4, dtype) - kNarrow];
}

std::uint32_t code_at(const std::byte* data, std::size_t item) {
  std::uint32_t code = 0;
  std::memcpy(&code, data, item);
  return code;
}

bool is_nan_code(const Format& format, std::uint32_t code) {
  return std::isnan(format.value(code));
}

// --- reductions, element by element -------------------------------------------------------------

template <class T>
T load_as(const std::byte* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}

template <class T>
T integer_op(ReduceOp op, T a, T b) {
  using U = std::make_unsigned_t<T>;
  const std::uint64_t x = static_cast<U>(a);
  const std::uint64_t y = static_cast<U>(b);
  switch (op) {
    case ReduceOp::kSum:
      return static_cast<T>(static_cast<U>(x + y));
    case ReduceOp::kProd:
      return static_cast<T>(static_cast<U>(x * y));
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kAnd:
      return static_cast<T>(x & y);
    case ReduceOp::kOr:
      return static_cast<T>(x | y);
    case ReduceOp::kXor:
      return static_cast<T>(x ^ y);
    case ReduceOp::kMean:
      break;
  }
  fail(__FILE__, __LINE__, "no such reduction");
}

template <class F>
F float_op(ReduceOp op, F a, F b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return a + b;
    case ReduceOp::kProd:
      return a * b;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<F>::quiet_NaN();
      return (op == ReduceOp::kMin) == (a < b) ? a : b;
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      break;
  }
  fail(__FILE__, __LINE__, "no such reduction");
}

using Sources = std::vector<const std::byte*>;

// Reduces the sources' values by the tree: the left half is the largest power of two.
template <class T, class Value, class Combine>
T over_tree(std::span<const std::byte* const> sources, const Value& value, const Combine& combine) {
  if (sources.size() == 1) return value(sources[0]);
  std::size_t left = 1;
  while (2 * left < sources.size()) left *= 2;
  return combine(over_tree<T>(sources.first(left), value, combine),
                 over_tree<T>(sources.subspan(left), value, combine));
}

template <class T>
bool integer_fits(ReduceOp op, const Sources& sources, std::size_t i, const std::byte* got) {
  const T expected = over_tree<T>(
      sources, [&](const std::byte* data) { return load_as<T>(data + i * sizeof(T)); },
      [&](T a, T b) { return integer_op<T>(op, a, b); });
  return load_as<T>(got + i * sizeof(T)) == expected;
}

template <class F>
bool same_float(F a, F b) {
  return (std::isnan(a) && std::isnan(b)) || a == b;
}

template <class F>
bool float_fits(ReduceOp op, const Sources& sources, std::size_t i, const std::byte* got) {
  F expected = over_tree<F>(
      sources, [&](const std::byte* data) { return load_as<F>(data + i * sizeof(F)); },
      [&](F a, F b) { return float_op<F>(op, a, b); });
  if (op == ReduceOp::kMean) expected /= static_cast<F>(sources.size());
  return same_float(load_as<F>(got + i * sizeof(F)), expected);
}

bool narrow_fits(DType dtype, ReduceOp op, const Sources& sources, std::size_t i,
                 const std::byte* got) {
  const Narrower& narrow = narrower(dtype);
  const std::size_t item = size_of(dtype);
  const auto value = [&](const std::byte* data) {
    return static_cast<float>(narrow.format().value(code_at(data + i * item, item)));
  };
  float expected =
      over_tree<float>(sources, value, [&](float a, float b) { return float_op<float>(op, a, b); });
  if (op == ReduceOp::kMean) expected /= static_cast<float>(sources.size());
  const double rounded = narrow.format().value(narrow(expected));
  return same_float(narrow.format().value(code_at(got + i * item, item)), rounded);
}

template <class F>
bool complex_fits(ReduceOp op, const Sources& sources, std::size_t i, const std::byte* got) {
  using Pair = std::pair<F, F>;
  const auto value = [&](const std::byte* data) {
    return Pair{load_as<F>(data + 2 * i * sizeof(F)), load_as<F>(data + (2 * i + 1) * sizeof(F))};
  };
  auto [re, im] = over_tree<Pair>(sources, value, [&](const Pair& a, const Pair& b) {
    if (op != ReduceOp::kProd) return Pair{a.first + b.first, a.second + b.second};
    return Pair{a.first * b.first - a.second * b.second, a.first * b.second + a.second * b.first};
  });
  if (op == ReduceOp::kMean) {
    re /= static_cast<F>(sources.size());
    im /= static_cast<F>(sources.size());
  }
  return same_float(value(got).first, re) && same_float(value(got).second, im);
}

bool fits(DType dtype, ReduceOp op, const Sources& sources, std::size_t i, const std::byte* got) {
  switch (dtype) {
    case DType::kBool: {
      bool expected = load_as<std::uint8_t>(sources[0] + i) != 0;
      for (std::size_t s = 1; s < sources.size(); ++s) {
        const bool next = load_as<std::uint8_t>(sources[s] + i) != 0;
        const bool is_and = op == ReduceOp::kAnd || op == ReduceOp::kProd || op == ReduceOp::kMin;
        expected = op == ReduceOp::kXor ? expected != next
                   : is_and             ? expected && next
                                        : expected || next;
      }
      return load_as<std::uint8_t>(got + i) == static_cast<std::uint8_t>(expected);
    }
    case DType::kInt8:
      return integer_fits<std::int8_t>(op, sources, i, got);
    case DType::kInt16:
      return integer_fits<std::int16_t>(op, sources, i, got);
    case DType::kInt32:
      return integer_fits<std::int32_t>(op, sources, i, got);
    case DType::kInt64:
      return integer_fits<std::int64_t>(op, sources, i, got);
    case DType::kUInt8:
      return integer_fits<std::uint8_t>(op, sources, i, got);
    case DType::kUInt16:
      return integer_fits<std::uint16_t>(op, sources, i, got);
    case DType::kUInt32:
      return integer_fits<std::uint32_t>(op, sources, i, got);
    case DType::kUInt64:
      return integer_fits<std::uint64_t>(op, sources, i, got);
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
      return narrow_fits(dtype, op, sources, i, got);
    case DType::kFloat32:
      return float_fits<float>(op, sources, i, got);
    case DType::kFloat64:
      return float_fits<double>(op, sources, i, got);
    case DType::kComplex64:
      return complex_fits<float>(op, sources, i, got);
    case DType::kComplex128:
      return complex_fits<double>(op, sources, i, got);
  }
  return false;
}

// Random elements: all bit patterns of the narrow formats, and some special values for floats.
template <class F>
F any_float(std::uint64_t random) {
  constexpr F kSpecial[] = {0,
                            static_cast<F>(-0.0),
                            1,
                            std::numeric_limits<F>::infinity(),
                            -std::numeric_limits<F>::infinity(),
                            std::numeric_limits<F>::quiet_NaN(),
                            std::numeric_limits<F>::denorm_min(),
                            std::numeric_limits<F>::max()};
  if (random % 16 == 0) return kSpecial[random / 16 % 8];
  return static_cast<F>(static_cast<double>(static_cast<std::int64_t>(random)) * 0x1p-60);
}

void fill(DType dtype, std::byte* data, std::size_t count, std::uint64_t seed) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t random = mix(seed, static_cast<std::uint64_t>(dtype), i);
    const std::uint64_t other = mix(seed + 1, static_cast<std::uint64_t>(dtype), i);
    if (dtype == DType::kBool) {
      data[i] = static_cast<std::byte>(random >> 20 & 1);
    } else if (dtype == DType::kFloat32 || dtype == DType::kComplex64) {
      const float parts[] = {any_float<float>(random), any_float<float>(other)};
      std::memcpy(data + i * size_of(dtype), parts, size_of(dtype));
    } else if (dtype == DType::kFloat64 || dtype == DType::kComplex128) {
      const double parts[] = {any_float<double>(random), any_float<double>(other)};
      std::memcpy(data + i * size_of(dtype), parts, size_of(dtype));
    } else {
      std::memcpy(data + i * size_of(dtype), &random, size_of(dtype));
    }
  }
}

bool is_defined(ReduceOp op, DType dtype) {
  try {
    check_reducible(op, dtype);
    return true;
  } catch (const Error&) {
    return false;
  }
}

constexpr std::size_t kCounts[] = {0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 257, 1029};

void check_reduce(const Kernels& kernels, DType dtype, ReduceOp op, std::size_t n,
                  std::size_t count, std::size_t skip, int in_place) {
  const std::size_t bytes = count * size_of(dtype);
  std::vector<std::unique_ptr<std::byte[]>> memory;  // of exactly the size that kernels may access
  Sources originals;
  Sources sources;
  for (std::size_t s = 0; s < n; ++s) {
    memory.push_back(std::make_unique<std::byte[]>(bytes + skip));
    std::byte* data = memory.back().get() + skip;
    fill(dtype, data, count, count * 31 + s);
    sources.push_back(data);
    memory.push_back(std::make_unique<std::byte[]>(bytes));
    if (bytes != 0) std::memcpy(memory.back().get(), data, bytes);
    originals.push_back(memory.back().get());
  }
  auto result = std::make_unique<std::byte[]>(bytes + skip);
  std::byte* dst = in_place >= 0
                       ? const_cast<std::byte*>(sources[static_cast<std::size_t>(in_place)])
                       : result.get() + skip;
  auto second = std::make_unique<std::byte[]>(bytes + skip);
  std::byte* also = count % 2 == 0 ? second.get() + skip : nullptr;
  const Groups groups(n);
  function_of(kernels, dtype, op)(dst, also, sources.data(), groups.tree(), count);
  CHECK(also == nullptr || std::memcmp(also, dst, bytes) == 0);
  for (std::size_t i = 0; i < count; ++i) {
    CHECK_THAT(fits(dtype, op, originals, i, dst),
               kernels.name << " " << name_of(op) << " of " << name_of(dtype) << ", " << n
                            << " sources, element " << i << " of " << count << ", skip " << skip);
  }
}

void check_reductions(DType dtype) {
  for (const Kernels* kernels : instruction_sets()) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (!is_defined(op, dtype)) {
        CHECK(function_of(*kernels, dtype, op) == nullptr);
        continue;
      }
      for (const std::size_t n : {1U, 2U, 3U, 8U, 13U}) {
        for (const std::size_t count : kCounts) {
          check_reduce(*kernels, dtype, op, n, count, 0, -1);
          check_reduce(*kernels, dtype, op, n, count, size_of(dtype), static_cast<int>(n) - 1);
          check_reduce(*kernels, dtype, op, n, count, 1, 0);
        }
      }
    }
  }
}

CASE(reduce_bool) { check_reductions(DType::kBool); }
CASE(reduce_int8) { check_reductions(DType::kInt8); }
CASE(reduce_int16) { check_reductions(DType::kInt16); }
CASE(reduce_int32) { check_reductions(DType::kInt32); }
CASE(reduce_int64) { check_reductions(DType::kInt64); }
CASE(reduce_uint8) { check_reductions(DType::kUInt8); }
CASE(reduce_uint16) { check_reductions(DType::kUInt16); }
CASE(reduce_uint32) { check_reductions(DType::kUInt32); }
CASE(reduce_uint64) { check_reductions(DType::kUInt64); }
CASE(reduce_float16) { check_reductions(DType::kFloat16); }
CASE(reduce_bfloat16) { check_reductions(DType::kBFloat16); }
CASE(reduce_float8_e4m3fn) { check_reductions(DType::kFloat8E4M3FN); }
CASE(reduce_float8_e5m2) { check_reductions(DType::kFloat8E5M2); }
CASE(reduce_float32) { check_reductions(DType::kFloat32); }
CASE(reduce_float64) { check_reductions(DType::kFloat64); }
CASE(reduce_complex64) { check_reductions(DType::kComplex64); }
CASE(reduce_complex128) { check_reductions(DType::kComplex128); }

// The bits must not depend on an element's index: vector loop or tail.
CASE(bits_do_not_depend_on_the_place) {
  for (const Kernels* kernels : instruction_sets()) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3FN,
                              DType::kFloat32, DType::kFloat64, DType::kComplex64}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kProd}) {
        constexpr std::size_t kCount = 1000;
        const std::size_t item = size_of(dtype);
        std::vector<std::vector<std::byte>> data(3, std::vector<std::byte>(kCount * item));
        Sources sources;
        for (std::size_t s = 0; s < 3; ++s) {
          fill(dtype, data[s].data(), kCount, s);
          sources.push_back(data[s].data());
        }
        std::vector<std::byte> whole(kCount * item);
        std::vector<std::byte> one(item);
        const Groups groups(3);
        function_of(*kernels, dtype, op)(whole.data(), nullptr, sources.data(), groups.tree(),
                                         kCount);
        const Format format = format_of(dtype);
        for (std::size_t i = 0; i < kCount; ++i) {
          Sources at;
          for (const std::byte* s : sources) at.push_back(s + i * item);
          function_of(*kernels, dtype, op)(one.data(), nullptr, at.data(), groups.tree(), 1);
          if (std::memcmp(one.data(), whole.data() + i * item, item) == 0) continue;
          // NaNs may differ in their payload.
          const bool nan = is_narrow(dtype) ? is_nan_code(format, code_at(one.data(), item))
                                            : fits(dtype, op, at, 0, whole.data() + i * item);
          CHECK_THAT(nan, kernels->name << " " << name_of(dtype) << " element " << i);
        }
      }
    }
  }
}

// --- conversion ---------------------------------------------------------------------------------

CASE(widening_is_exact_for_every_pattern) {
  for (const Kernels* kernels : instruction_sets()) {
    for (const DType dtype : kNarrow) {
      const Format format = format_of(dtype);
      const std::size_t item = size_of(dtype);
      const std::size_t count = std::size_t{1} << format.bits();
      std::vector<std::byte> codes(count * item);
      for (std::size_t c = 0; c < count; ++c) std::memcpy(codes.data() + c * item, &c, item);
      std::vector<float> floats(count);
      std::vector<double> doubles(count);
      kernels->convert(DType::kFloat32, reinterpret_cast<std::byte*>(floats.data()), dtype,
                       codes.data(), count, 1.0F);
      kernels->convert(DType::kFloat64, reinterpret_cast<std::byte*>(doubles.data()), dtype,
                       codes.data(), count, 1.0F);
      for (std::size_t c = 0; c < count; ++c) {
        const double expected = format.value(static_cast<std::uint32_t>(c));
        CHECK_THAT(same_float<double>(floats[c], expected),
                   kernels->name << " " << name_of(dtype) << " " << c);
        CHECK_THAT(same_float(doubles[c], expected),
                   kernels->name << " " << name_of(dtype) << " " << c);
        CHECK(std::isnan(expected) || std::signbit(floats[c]) == std::signbit(expected));
        float alone = 0;  // from the scalar loop
        kernels->convert(DType::kFloat32, reinterpret_cast<std::byte*>(&alone), dtype,
                         codes.data() + c * item, 1, 1.0F);
        CHECK(same_float(alone, floats[c]));
      }
    }
  }
}

// Every value of a format, every halfway point between two values, and the neighbours of both.
std::vector<float> hard_floats(DType dtype) {
  const Format format = format_of(dtype);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> values;
  for (std::uint32_t code = 0; code <= format.largest(); ++code) {
    const auto low = static_cast<float>(format.magnitude(code));
    const double between = (format.magnitude(code) + format.magnitude(code + 1)) / 2;
    const auto middle = static_cast<float>(between);
    for (const float v : {low, middle}) {
      for (const float w : {v, std::nextafter(v, kInfinity), std::nextafter(v, -kInfinity)}) {
        values.push_back(w);
        values.push_back(-w);
      }
    }
  }
  for (const float v : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(),
                        std::numeric_limits<float>::max(), -std::numeric_limits<float>::max(),
                        std::numeric_limits<float>::denorm_min()}) {
    values.push_back(v);
  }
  for (std::uint64_t i = 0; i < 200'000; ++i) {  // random bits
    const auto bits = static_cast<std::uint32_t>(mix(1, 2, i));
    float v;
    std::memcpy(&v, &bits, sizeof(v));
    values.push_back(v);
  }
  return values;
}

template <class F>
void check_narrowing(const Kernels& kernels, DType dtype, DType from,
                     const std::vector<F>& values) {
  const Narrower& narrow = narrower(dtype);
  const std::size_t item = size_of(dtype);
  std::vector<std::byte> codes(values.size() * item);
  kernels.convert(dtype, codes.data(), from, reinterpret_cast<const std::byte*>(values.data()),
                  values.size(), 1.0F);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t expected = narrow(values[i]);
    std::uint32_t alone = 0;
    kernels.convert(dtype, reinterpret_cast<std::byte*>(&alone), from,
                    reinterpret_cast<const std::byte*>(&values[i]), 1, 1.0F);
    for (const std::uint32_t got : {code_at(codes.data() + i * item, item), alone}) {
      const bool same = is_nan_code(narrow.format(), expected) ? is_nan_code(narrow.format(), got)
                                                               : got == expected;
      CHECK_THAT(same, kernels.name << " " << values[i] << " (element " << i << ") to "
                                    << name_of(dtype) << " gives " << got << ", expected "
                                    << expected);
    }
  }
}

CASE(narrowing_rounds_to_nearest_even) {
  for (const DType dtype : kNarrow) {
    const std::vector<float> values = hard_floats(dtype);
    for (const Kernels* kernels : instruction_sets()) {
      check_narrowing(*kernels, dtype, DType::kFloat32, values);
    }
  }
}

// A double next to a halfway point must not be rounded onto it through float32.
CASE(narrowing_doubles_rounds_once) {
  for (const DType dtype : kNarrow) {
    std::vector<double> values;
    for (const float v : hard_floats(dtype)) {
      constexpr double kInfinity = std::numeric_limits<double>::infinity();
      for (const double w : {double{v}, std::nextafter(double{v}, kInfinity),
                             std::nextafter(double{v}, -kInfinity)}) {
        values.push_back(w);
      }
    }
    for (const double v : {1e300, -1e300, 1e-300, 3.4028235e38, 3.5e38}) values.push_back(v);
    for (const Kernels* kernels : instruction_sets()) {
      check_narrowing(*kernels, dtype, DType::kFloat64, values);
    }
  }
}

CASE(conversion_scales) {
  for (const Kernels* kernels : instruction_sets()) {
    std::vector<float> values(77);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 30.0F;
    std::vector<float> scaled(values.size());
    kernels->convert(DType::kFloat32, reinterpret_cast<std::byte*>(scaled.data()), DType::kFloat32,
                     reinterpret_cast<const std::byte*>(values.data()), values.size(), 0.25F);
    std::vector<double> back(values.size());
    kernels->convert(DType::kFloat64, reinterpret_cast<std::byte*>(back.data()), DType::kFloat32,
                     reinterpret_cast<const std::byte*>(scaled.data()), values.size(), 4.0F);
    for (std::size_t i = 0; i < values.size(); ++i) {
      CHECK(scaled[i] == values[i] * 0.25F);
      CHECK(back[i] == values[i]);
    }
  }
}

CASE(largest_magnitude_finds_nan_and_sign) {
  const auto of = [](const std::vector<double>& v) {
    return host::largest_magnitude(DType::kFloat64, reinterpret_cast<const std::byte*>(v.data()),
                                   v.size());
  };
  CHECK(of({}) == 0.0);
  CHECK(of({1.0, -3.0, 2.0}) == 3.0);
  CHECK(std::isnan(of({1.0, std::nan(""), 2.0})));
  CHECK(std::isinf(of({1.0, -INFINITY})));
  const float f = -2.5F;
  CHECK(host::largest_magnitude(DType::kFloat32, reinterpret_cast<const std::byte*>(&f), 1) == 2.5);
}

// --- copies -------------------------------------------------------------------------------------

CASE(copies_at_every_alignment) {
  constexpr std::size_t kLengths[] = {0,   1,   15,  63,  64,  65,  255,  256,  257, 318,
                                      319, 320, 321, 511, 512, 513, 1000, 1024, 2047};
  constexpr std::size_t kRoom = 2300;
  const auto guard = std::byte{0xA5};
  std::vector<std::byte> from(kRoom);
  for (std::size_t i = 0; i < kRoom; ++i) from[i] = static_cast<std::byte>(mix(3, 4, i));
  std::vector<std::byte> to(kRoom);
  const auto check = [&](const Kernels& kernels, std::size_t bytes, std::size_t d, std::size_t s,
                         bool stream) {
    std::fill(to.begin(), to.end(), guard);
    (stream ? kernels.copy_past_caches : kernels.copy)(to.data() + 64 + d, from.data() + s, bytes);
    CHECK(std::memcmp(to.data() + 64 + d, from.data() + s, bytes) == 0);
    const auto is_guard = [&](std::byte b) { return b == guard; };
    const auto end = static_cast<std::ptrdiff_t>(64 + d + bytes);
    CHECK(std::all_of(to.begin(), to.begin() + static_cast<std::ptrdiff_t>(64 + d), is_guard));
    CHECK(std::all_of(to.begin() + end, to.end(), is_guard));
  };
  for (const Kernels* kernels : instruction_sets()) {
    for (const std::size_t bytes : kLengths) {
      for (std::size_t d = 0; d < 64; ++d) {
        for (const std::size_t s : {0U, 1U, 8U, 13U, 32U, 63U}) {
          check(*kernels, bytes, d, s, true);
          check(*kernels, bytes, d, s, false);
        }
      }
    }
  }
}

// Comparisons, after 64 KiB and then less often, copy a part each way.
CASE(copies_to_peers_are_whole) {
  std::vector<std::byte> from(100'000);
  std::vector<std::byte> to(from.size());
  host::CopyToPeers copy_to_peers;
  const std::size_t lengths[] = {0, 1, 1000, 8191, 8192, 8193, 20'000, 99'000};
  for (std::uint64_t round = 0; round < 200; ++round) {
    const std::size_t bytes = lengths[round % std::size(lengths)];
    for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::byte>(mix(5, round, i));
    copy_to_peers(to.data() + round % 64, from.data() + round % 7, bytes);
    CHECK(std::memcmp(to.data() + round % 64, from.data() + round % 7, bytes) == 0);
  }
}

CASE(the_widest_set_is_picked) {
  CHECK(host::instruction_set() == instruction_sets().back()->name);
}

}  // namespace
}  // namespace fastdist::test
