#include "table/wire.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.h"
#include "table/kernels.h"

namespace fastdist::table {
namespace {

constexpr std::size_t kScaleBytes = sizeof(float);

constexpr std::size_t int8_row_bytes(std::size_t values) {
  return kScaleBytes + (values + 3) / 4 * 4;
}

}  // namespace

WireFormat::WireFormat(std::string_view name, std::size_t dim) : dim_(dim) {
  if (dim == 0) throw Error(ErrorCode::kValue, "dim must be 1 or more, got 0");
  if (name == "bfloat16") {
    kind_ = Kind::kBFloat16;
  } else if (name == "float16") {
    kind_ = Kind::kFloat16;
  } else if (name == "int8") {
    kind_ = Kind::kInt8;
  } else {
    throw Error(ErrorCode::kValue,
                "unknown wire format: expected float32, bfloat16, float16 or int8, got " +
                    std::string(name));
  }
}

std::size_t WireFormat::bytes(std::size_t values) const noexcept {
  switch (kind_) {
    case Kind::kBFloat16:
    case Kind::kFloat16:
      return values * sizeof(std::uint16_t);
    case Kind::kInt8: {
      const std::size_t rest = values % dim_;
      return values / dim_ * int8_row_bytes(dim_) + (rest == 0 ? 0 : int8_row_bytes(rest));
    }
  }
  return 0;
}

void WireFormat::check_size(std::size_t values, std::size_t size) const {
  if (size == bytes(values)) return;
  throw Error(ErrorCode::kValue, "a message of " + std::to_string(values) + " values has " +
                                     std::to_string(bytes(values)) + " bytes, got " +
                                     std::to_string(size));
}

void WireFormat::encode(std::span<const float> values, std::span<std::uint8_t> message) const {
  check_size(values.size(), message.size());
  if (values.empty()) return;
  auto* to = message.data();
  switch (kind_) {
    case Kind::kBFloat16:
      return kernels().narrow_bfloat16(reinterpret_cast<std::uint16_t*>(to), values.data(),
                                       values.size());
    case Kind::kFloat16:
      return kernels().narrow_float16(reinterpret_cast<std::uint16_t*>(to), values.data(),
                                      values.size());
    case Kind::kInt8:
      break;
  }
  for (std::size_t at = 0; at < values.size(); at += dim_) {
    const std::size_t count = std::min(dim_, values.size() - at);
    std::memset(to + int8_row_bytes(count) - 4, 0, 4);
    const float scale = kernels().narrow_int8(reinterpret_cast<std::int8_t*>(to) + kScaleBytes,
                                              values.data() + at, count);
    std::memcpy(to, &scale, kScaleBytes);
    to += int8_row_bytes(count);
  }
}

void WireFormat::decode(std::span<const std::uint8_t> message, std::span<float> values) const {
  check_size(values.size(), message.size());
  if (values.empty()) return;
  const auto* from = message.data();
  switch (kind_) {
    case Kind::kBFloat16:
      return kernels().widen_bfloat16(values.data(), reinterpret_cast<const std::uint16_t*>(from),
                                      values.size());
    case Kind::kFloat16:
      return kernels().widen_float16(values.data(), reinterpret_cast<const std::uint16_t*>(from),
                                     values.size());
    case Kind::kInt8:
      break;
  }
  for (std::size_t at = 0; at < values.size(); at += dim_) {
    const std::size_t count = std::min(dim_, values.size() - at);
    float scale;
    std::memcpy(&scale, from, kScaleBytes);
    kernels().widen_int8(values.data() + at,
                         reinterpret_cast<const std::int8_t*>(from) + kScaleBytes, scale, count);
    from += int8_row_bytes(count);
  }
}

}  // namespace fastdist::table
