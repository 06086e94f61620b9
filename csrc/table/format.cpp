#include "table/format.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"
#include "table/kernels.h"
#include "table/memory.h"

namespace fastdist::table {
namespace {

constexpr std::array<std::string_view, 4> kFormatNames{"float32", "bfloat16", "float16", "int8"};
constexpr std::size_t kScaleBytes = sizeof(float);

}  // namespace

std::optional<Format> find_format(std::string_view name) noexcept {
  const auto found = std::ranges::find(kFormatNames, name);
  if (found == kFormatNames.end()) return std::nullopt;
  return static_cast<Format>(found - kFormatNames.begin());
}

std::size_t row_bytes(Format format, std::size_t count) noexcept {
  switch (format) {
    case Format::kFloat32:
      return count * sizeof(float);
    case Format::kBFloat16:
    case Format::kFloat16:
      return count * sizeof(std::uint16_t);
    case Format::kInt8:
      return kScaleBytes + (count + 3) / 4 * 4;
  }
  return 0;
}

void read_row(Format format, float* values, const std::byte* row, std::size_t count) {
  switch (format) {
    case Format::kFloat32:
      std::memcpy(values, row, count * sizeof(float));
      return;
    case Format::kBFloat16:
      return kernels().widen_bfloat16(values, reinterpret_cast<const std::uint16_t*>(row), count);
    case Format::kFloat16:
      return kernels().widen_float16(values, reinterpret_cast<const std::uint16_t*>(row), count);
    case Format::kInt8:
      float scale;
      std::memcpy(&scale, row, kScaleBytes);
      return kernels().widen_int8(values, reinterpret_cast<const std::int8_t*>(row + kScaleBytes),
                                  scale, count);
  }
}

void write_row(Format format, std::byte* row, const float* values, std::size_t count) {
  switch (format) {
    case Format::kFloat32:
      std::memcpy(row, values, count * sizeof(float));
      return;
    case Format::kBFloat16:
      return kernels().narrow_bfloat16(reinterpret_cast<std::uint16_t*>(row), values, count);
    case Format::kFloat16:
      return kernels().narrow_float16(reinterpret_cast<std::uint16_t*>(row), values, count);
    case Format::kInt8:
      std::memset(row + row_bytes(format, count) - 4, 0, 4);
      const float scale =
          kernels().narrow_int8(reinterpret_cast<std::int8_t*>(row + kScaleBytes), values, count);
      std::memcpy(row, &scale, kScaleBytes);
      return;
  }
}

WireFormat::WireFormat(std::string_view name, std::size_t dim) {
  const std::optional<Format> format = find_format(name);
  if (!format || format == Format::kFloat32) {
    refuse(ErrorCode::kValue,
           "unknown wire format: expected float32, bfloat16, float16 or int8, got ", name);
  }
  if (dim == 0) refuse(ErrorCode::kValue, "dim must be 1 or more, got 0");
  format_ = *format;
  dim_ = format == Format::kInt8 ? dim : SIZE_MAX;  // other formats convert all values as one row
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
  const std::size_t stride = row_bytes(format_, dim_);
  for (std::size_t at = 0, row = 0; at < values.size(); at += dim_, row += stride) {
    write_row(format_, to + row, values.data() + at, std::min(dim_, values.size() - at));
  }
}

void WireFormat::decode(std::span<const std::uint8_t> message, std::span<float> values) const {
  check_size(values.size(), message.size());
  const auto* from = reinterpret_cast<const std::byte*>(message.data());
  const std::size_t stride = row_bytes(format_, dim_);
  for (std::size_t at = 0, row = 0; at < values.size(); at += dim_, row += stride) {
    read_row(format_, values.data() + at, from + row, std::min(dim_, values.size() - at));
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
