// Loops over memory: reduce, copy, convert. They are compiled once per instruction set; the widest
// one that the processor supports is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/types.h"

namespace fastdist::host {

// Reduces the sources' elements by the tree over their numbers (core/reduction_tree.h), or by the
// one that `after` describes: as many reductions follow source i. dst may be one of the sources.
// `also` receives a copy unless it is null. float16, bfloat16 and float8 accumulate in float32.
// Means are divided by `divisor` or, if it is 0, by the number of sources. The operation must be
// defined for the dtype.
void reduce(DType dtype, ReduceOp op, std::byte* dst, std::byte* also,
            std::span<const std::byte* const> sources, std::size_t count,
            std::span<const std::uint8_t> after = {}, std::size_t divisor = 0);

// Copies memory. With `stream`, stores bypass the caches, for data that is not read again soon. A
// release store does not order such stores; an atomic exchange does (on x86 a locked instruction
// drains them).
void copy(std::byte* dst, const std::byte* src, std::size_t bytes, bool stream);

// Computes dst[i] = src[i] × scale between floating dtypes, rounded to nearest even.
void convert(DType dst_dtype, std::byte* dst, DType src_dtype, const std::byte* src,
             std::size_t count, float scale);

// Returns max |src[i]| of a floating array, or NaN if any element is NaN.
[[nodiscard]] double largest_magnitude(DType dtype, const std::byte* src, std::size_t count);

// Returns "avx512", "avx2" or "generic".
[[nodiscard]] std::string_view instruction_set();

// Before a core writes a line that another core's cache holds, that copy is discarded. Between
// cores that share a last-level cache this takes a few nanoseconds per line; elsewhere up to 35,
// far longer than to read the line. Stores that bypass the caches do not wait for it, but the peer
// then reads from memory. Which is faster depends on where the cores are, which may change: the
// host of a virtual machine moves them. So both ways are timed now and then.
class CopyToPeers {
 public:
  void operator()(std::byte* dst, const std::byte* src, std::size_t bytes) noexcept;

  [[nodiscard]] bool past_caches() const noexcept { return past_caches_; }

 private:
  void compare(std::byte* dst, const std::byte* src) noexcept;

  bool past_caches_ = false;
  // Bytes to copy until the next comparison, and between comparisons.
  std::ptrdiff_t period_ = std::ptrdiff_t{64} << 10;
  std::ptrdiff_t until_comparison_ = period_;
};

}  // namespace fastdist::host
