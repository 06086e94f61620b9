#include "table/row_layout.h"

#include <array>

#include "table/memory.h"
#include "table/refuse.h"

namespace fastdist::table {
namespace {

// Rounds a row up to whole cache lines if that adds little memory: aligned rows touch fewer lines.
std::size_t stride_of(std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  const std::size_t lines = round_up(bytes, kLine);
  return (lines - bytes) * 16 <= bytes ? lines : bytes;
}

}  // namespace

Format storage_of(std::string_view name) {
  const std::optional<Format> format = find_format(name);
  if (format && format != Format::kFloat16) return *format;
  refuse(ErrorCode::kValue, "unknown storage: expected float32, bfloat16 or int8, got ", name);
}

RowLayout::RowLayout(std::size_t dim, Format storage, const UpdateRule& rule)
    : dim_(dim),
      storage_(storage),
      slots_(rule.slots().size()),
      slot_width_(rule.slot_width(dim)),
      value_bytes_(round_up(row_bytes(storage, dim), sizeof(float))),
      stride_(stride_of(value_bytes_ + slot_floats() * sizeof(float))) {}

void RowLayout::update(std::byte* row, UpdateFunction update, const Coefficients& c,
                       const float* gradient, float* scratch) const {
  std::array<float*, kMaxSlots> pointers;
  for (std::size_t i = 0; i < slots_; ++i) pointers[i] = slots(row) + i * slot_width_;
  if (storage_ == Format::kFloat32) {
    return update(c, reinterpret_cast<float*>(row), gradient, pointers.data(), dim_);
  }
  read(scratch, row);
  update(c, scratch, gradient, pointers.data(), dim_);
  write(row, scratch);
}

}  // namespace fastdist::table
