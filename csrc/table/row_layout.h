// The memory layout of a row: its values in the table's storage format, then its slots in float32.
#pragma once

#include <cstddef>
#include <cstring>
#include <string_view>

#include "table/format.h"
#include "table/kernels.h"
#include "table/update_rule.h"

namespace fastdist::table {

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
    if (storage_ != Format::kFloat32) return read_row(storage_, values, row, dim_);
    std::memcpy(values, row, dim_ * sizeof(float));
  }
  void write(std::byte* row, const float* values) const { write_row(storage_, row, values, dim_); }
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
