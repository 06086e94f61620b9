#include "table/format.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/error.h"
#include "core/types.h"
#include "table/kernels.h"

namespace fastdist::table {
namespace {

constexpr std::array<std::string_view, 4> kNames{"float32", "bfloat16", "float16", "int8"};

// Returns the format of that name unless it is `other`, which `what` cannot have.
Format format_of(std::string_view name, Format other, const char* what) {
  const auto found = std::ranges::find(kNames, name) - kNames.begin();
  if (found != std::ssize(kNames) && static_cast<Format>(found) != other) {
    return static_cast<Format>(found);
  }
  refuse(ErrorCode::kValue, "unknown ", what, ", got ", name);
}

std::size_t row_bytes(Format format, std::size_t count) noexcept {
  if (format == Format::kFloat32) return count * sizeof(float);
  if (format == Format::kInt8) return sizeof(float) + round_up(count, 4);
  return count * sizeof(std::uint16_t);
}

}  // namespace

WireFormat::WireFormat(std::string_view name, std::size_t dim)
    : format_(format_of(name, Format::kFloat32,
                        "wire format: expected float32, bfloat16, float16 or int8")),
      // Formats without a scale convert all values as one row.
      dim_(format_ == Format::kInt8 ? dim : SIZE_MAX) {
  if (dim == 0) refuse(ErrorCode::kValue, "dim must be 1 or more, got 0");
}

std::size_t WireFormat::bytes(std::size_t values) const noexcept {
  const std::size_t rest = values % dim_;
  return values / dim_ * row_bytes(format_, dim_) + (rest == 0 ? 0 : row_bytes(format_, rest));
}

void WireFormat::check_size(std::size_t values, std::size_t size) const {
  if (size == bytes(values)) return;
  refuse(ErrorCode::kValue, "a message of ", values, " values has ", bytes(values), " bytes, got ",
         size);
}

void WireFormat::encode(std::span<const float> values, std::span<std::uint8_t> message) const {
  check_size(values.size(), message.size());
  auto* to = reinterpret_cast<std::byte*>(message.data());
  const Codec& codec = kernels().codec(format_);
  const std::size_t stride = row_bytes(format_, dim_);
  for (std::size_t at = 0, row = 0; at < values.size(); at += dim_, row += stride) {
    codec.narrow(to + row, values.data() + at, std::min(dim_, values.size() - at));
  }
}

void WireFormat::decode(std::span<const std::uint8_t> message, std::span<float> values) const {
  check_size(values.size(), message.size());
  const auto* from = reinterpret_cast<const std::byte*>(message.data());
  const Codec& codec = kernels().codec(format_);
  const std::size_t stride = row_bytes(format_, dim_);
  for (std::size_t at = 0, row = 0; at < values.size(); at += dim_, row += stride) {
    codec.widen(values.data() + at, from + row, std::min(dim_, values.size() - at));
  }
}

// --- rows ---------------------------------------------------------------------------------------

namespace {

// Rounds a row up to whole cache lines if that adds little memory: aligned rows touch fewer lines.
std::size_t stride_of(std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  const std::size_t lines = round_up(bytes, kLine);
  return (lines - bytes) * 16 <= bytes ? lines : bytes;
}

}  // namespace

Format storage_of(std::string_view name) {
  return format_of(name, Format::kFloat16, "storage: expected float32, bfloat16 or int8");
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
