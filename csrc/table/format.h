// Formats of values in rows and messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "table/kernels.h"
#include "table/update_rule.h"

namespace fastdist::table {

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

// --- rows ---------------------------------------------------------------------------------------

// A row has its values in the table's storage format, then its slots in float32.

// Parses "float32", "bfloat16" or "int8"; throws kValue.
[[nodiscard]] Format storage_of(std::string_view name);

// Reads and writes whole rows. With narrow storage a step is computed in float32 in `scratch`, and
// its result is rounded once.
class RowLayout {
 public:
  RowLayout(std::size_t dim, Format storage, const UpdateRule& rule);

  [[nodiscard]] std::size_t dim() const noexcept { return dim_; }
  [[nodiscard]] std::size_t slot_floats() const noexcept { return slots_ * slot_width_; }
  [[nodiscard]] std::size_t value_bytes() const noexcept { return value_bytes_; }
  // Bytes from one row to the next.
  [[nodiscard]] std::size_t stride() const noexcept { return stride_; }

  void read(float* values, const std::byte* row) const {
    if (storage_ != Format::kFloat32) return kernels().codec(storage_).widen(values, row, dim_);
    std::memcpy(values, row, dim_ * sizeof(float));
  }
  void write(std::byte* row, const float* values) const {
    if (storage_ != Format::kFloat32) return kernels().codec(storage_).narrow(row, values, dim_);
    std::memcpy(row, values, dim_ * sizeof(float));
  }
  [[nodiscard]] float* slots(std::byte* row) const noexcept {
    return reinterpret_cast<float*>(row + value_bytes_);
  }
  void update(std::byte* row, UpdateFunction update, const Coefficients& c, const float* gradient,
              float* scratch) const;

 private:
  std::size_t dim_;
  Format storage_;
  std::size_t slots_;
  std::size_t slot_width_;
  std::size_t value_bytes_;
  std::size_t stride_;
};

}  // namespace fastdist::table
