// Formats of values in rows and messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace fastdist::table {

// An int8 row is a float32 scale, one byte per value, and zeros up to a multiple of 4 bytes.
enum class Format : std::uint8_t { kFloat32, kBFloat16, kFloat16, kInt8 };

// Parses "float32", "bfloat16", "float16" or "int8".
[[nodiscard]] std::optional<Format> find_format(std::string_view name) noexcept;

[[nodiscard]] std::size_t row_bytes(Format format, std::size_t count) noexcept;
void read_row(Format format, float* values, const std::byte* row, std::size_t count);
// Rounds to nearest, ties to even.
void write_row(Format format, std::byte* row, const float* values, std::size_t count);

// The format of a message, and the number of values per row: int8 has one scale per row. The last
// row may be shorter.
class WireFormat {
 public:
  // `name` is "bfloat16", "float16" or "int8"; throws kValue for others.
  WireFormat(std::string_view name, std::size_t dim);

  [[nodiscard]] std::size_t bytes(std::size_t values) const noexcept;
  // encode and decode throw kValue if the sizes do not match.
  void encode(std::span<const float> values, std::span<std::uint8_t> message) const;
  void decode(std::span<const std::uint8_t> message, std::span<float> values) const;

 private:
  void check_size(std::size_t values, std::size_t size) const;

  Format format_;
  std::size_t dim_;
};

}  // namespace fastdist::table
