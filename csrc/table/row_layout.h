// The memory layout of a row: its values in the table's storage, then its slots in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "table/kernels.h"
#include "table/update_rule.h"

namespace fastdist::table {

// An int8 row is a float32 scale, then one byte per element.
enum class Storage : std::uint8_t { kFloat32, kBFloat16, kInt8 };

// Parses "float32", "bfloat16" or "int8"; throws kValue.
[[nodiscard]] Storage storage_of(std::string_view name);

// Reads and writes whole rows. With narrow storage a step is computed in float32 in `scratch`, and
// its result is rounded once.
class RowLayout {
 public:
  RowLayout(std::size_t dim, Storage storage, const UpdateRule& rule);

  [[nodiscard]] std::size_t dim() const noexcept { return dim_; }
  [[nodiscard]] Storage storage() const noexcept { return storage_; }
  [[nodiscard]] std::size_t slot_floats() const noexcept { return slots_ * slot_width_; }
  [[nodiscard]] std::size_t value_bytes() const noexcept { return value_bytes_; }
  // Bytes from one row to the next.
  [[nodiscard]] std::size_t stride() const noexcept { return stride_; }

  void read(float* values, const std::byte* row) const {
    if (storage_ != Storage::kFloat32) return read_narrow(values, row);
    std::memcpy(values, row, dim_ * sizeof(float));
  }
  // Rounds to nearest even.
  void write(std::byte* row, const float* values) const;
  void read_slots(float* slots, const std::byte* row) const;
  void write_slots(std::byte* row, const float* slots) const;
  void update(std::byte* row, UpdateFunction update, const Coefficients& c, const float* gradient,
              float* scratch) const;

 private:
  void read_narrow(float* values, const std::byte* row) const;

  std::size_t dim_;
  Storage storage_;
  std::size_t slots_;
  std::size_t slot_width_;
  std::size_t value_bytes_;
  std::size_t stride_;
};

}  // namespace fastdist::table
