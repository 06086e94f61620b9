// Encoding of values in messages, narrower than float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace fastdist::table {

// A format, and the number of values per row: int8 has one scale per row. The last row may be
// shorter. An int8 row is a float32 scale, one byte per value, and zeros up to a multiple of 4
// bytes.
class WireFormat {
 public:
  // "bfloat16", "float16" or "int8"; throws kValue.
  WireFormat(std::string_view name, std::size_t dim);

  [[nodiscard]] std::size_t bytes(std::size_t values) const noexcept;
  // Rounds to nearest. encode and decode throw kValue if the sizes do not match.
  void encode(std::span<const float> values, std::span<std::uint8_t> message) const;
  void decode(std::span<const std::uint8_t> message, std::span<float> values) const;

 private:
  enum class Kind : std::uint8_t { kBFloat16, kFloat16, kInt8 };

  void check_size(std::size_t values, std::size_t bytes) const;

  Kind kind_;
  std::size_t dim_;
};

}  // namespace fastdist::table
