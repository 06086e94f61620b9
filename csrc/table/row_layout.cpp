#include "table/row_layout.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/error.h"

namespace fastdist::table {
namespace {

constexpr std::array<std::string_view, 3> kNames{"float32", "bfloat16", "int8"};

std::size_t round_up(std::size_t value, std::size_t step) {
  return (value + step - 1) / step * step;
}

std::size_t value_bytes(std::size_t dim, Storage storage) {
  switch (storage) {
    case Storage::kFloat32:
      return dim * sizeof(float);
    case Storage::kBFloat16:
      return round_up(dim * sizeof(std::uint16_t), sizeof(float));
    case Storage::kInt8:
      return sizeof(float) + round_up(dim, sizeof(float));
  }
  return 0;
}

// Rounds a row up to whole cache lines if that adds little memory: aligned rows touch fewer lines.
std::size_t stride_of(std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  const std::size_t lines = round_up(bytes, kLine);
  return (lines - bytes) * 16 <= bytes ? lines : bytes;
}

}  // namespace

Storage storage_of(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<Storage>(i);
  }
  throw Error(ErrorCode::kValue,
              "unknown storage: expected float32, bfloat16 or int8, got " + std::string(name));
}

RowLayout::RowLayout(std::size_t dim, Storage storage, const UpdateRule& rule)
    : dim_(dim),
      storage_(storage),
      slots_(rule.slots().size()),
      slot_width_(rule.slot_width(dim)),
      value_bytes_(table::value_bytes(dim, storage)),
      stride_(stride_of(value_bytes_ + slot_floats() * sizeof(float))) {}

void RowLayout::read_narrow(float* values, const std::byte* row) const {
  switch (storage_) {
    case Storage::kFloat32:
      return;
    case Storage::kBFloat16:
      return kernels().widen_bfloat16(values, reinterpret_cast<const std::uint16_t*>(row), dim_);
    case Storage::kInt8:
      return kernels().widen_int8(values, reinterpret_cast<const std::int8_t*>(row) + sizeof(float),
                                  *reinterpret_cast<const float*>(row), dim_);
  }
}

void RowLayout::write(std::byte* row, const float* values) const {
  switch (storage_) {
    case Storage::kFloat32:
      std::memcpy(row, values, dim_ * sizeof(float));
      return;
    case Storage::kBFloat16:
      return kernels().narrow_bfloat16(reinterpret_cast<std::uint16_t*>(row), values, dim_);
    case Storage::kInt8:
      *reinterpret_cast<float*>(row) =
          kernels().narrow_int8(reinterpret_cast<std::int8_t*>(row) + sizeof(float), values, dim_);
      return;
  }
}

void RowLayout::read_slots(float* slots, const std::byte* row) const {
  std::copy_n(reinterpret_cast<const float*>(row + value_bytes_), slot_floats(), slots);
}

void RowLayout::write_slots(std::byte* row, const float* slots) const {
  std::copy_n(slots, slot_floats(), reinterpret_cast<float*>(row + value_bytes_));
}

void RowLayout::update(std::byte* row, UpdateFunction update, const Coefficients& c,
                       const float* gradient, float* scratch) const {
  std::array<float*, kMaxSlots> slots;
  for (std::size_t i = 0; i < slots_; ++i) {
    slots[i] = reinterpret_cast<float*>(row + value_bytes_) + i * slot_width_;
  }
  if (storage_ == Storage::kFloat32) {
    return update(c, reinterpret_cast<float*>(row), gradient, slots.data(), dim_);
  }
  read(scratch, row);
  update(c, scratch, gradient, slots.data(), dim_);
  write(row, scratch);
}

}  // namespace fastdist::table
