// How a row lies in memory: its values in the table's storage, then its slots in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "table/kernels.h"
#include "table/update_rule.h"

namespace fastdist::table {

// int8: a float32 scale, then one byte per element.
enum class Storage : std::uint8_t { kFloat32, kBFloat16, kInt8 };

// How the result of a step is rounded to narrow storage: to nearest even, or up or down by chance,
// so that small steps are not lost.
enum class Rounding : std::uint8_t { kNearest, kStochastic };

// "nearest" or "stochastic"; throws kValue.
[[nodiscard]] Rounding rounding_of(std::string_view name);

// "float32", "bfloat16" or "int8"; throws kValue.
[[nodiscard]] Storage storage_of(std::string_view name);
[[nodiscard]] std::string_view name_of(Storage storage) noexcept;

// What is done to a row as a whole. Where storage is narrow a step is computed in float32 and its
// result rounded once; scratch is room for the row's values meanwhile.
class RowLayout {
 public:
  RowLayout(std::size_t dim, Storage storage, Rounding rounding, const UpdateRule& rule);

  [[nodiscard]] std::size_t dim() const noexcept { return dim_; }
  [[nodiscard]] Storage storage() const noexcept { return storage_; }
  [[nodiscard]] std::size_t slots() const noexcept { return slots_; }
  [[nodiscard]] std::size_t slot_floats() const noexcept { return slots_ * dim_; }
  [[nodiscard]] std::size_t value_bytes() const noexcept { return value_bytes_; }
  // From one row to the next.
  [[nodiscard]] std::size_t stride() const noexcept { return stride_; }

  void read(float* values, const std::byte* row) const {
    if (storage_ != Storage::kFloat32) return read_narrow(values, row);
    std::memcpy(values, row, dim_ * sizeof(float));
  }
  // To nearest even.
  void write(std::byte* row, const float* values) const;
  void read_slots(float* slots, const std::byte* row) const;
  void write_slots(std::byte* row, const float* slots) const;
  // Where chance decides, `key` does: another for each row and step.
  void update(std::byte* row, UpdateFunction update, const Coefficients& c, const float* gradient,
              float* scratch, std::uint64_t key) const;

 private:
  void write_by_chance(std::byte* row, const float* values, std::uint64_t key) const;
  void read_narrow(float* values, const std::byte* row) const;

  std::size_t dim_;
  Storage storage_;
  Rounding rounding_;
  std::size_t slots_;
  std::size_t value_bytes_;
  std::size_t stride_;
};

}  // namespace fastdist::table
