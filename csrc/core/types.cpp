#include "core/types.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace fastdist {
namespace {

struct DTypeInfo {
  std::string_view name;
  std::size_t bytes;
};

constexpr std::array<DTypeInfo, kDTypeCount> kDTypes{{
    {"bool", 1},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"uint8", 1},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float8_e4m3fn", 1},
    {"float8_e5m2", 1},
    {"float32", 4},
    {"float64", 8},
    {"complex64", 8},
    {"complex128", 16},
}};

constexpr std::array<std::string_view, kReduceOpCount> kReduceOps{"sum", "mean", "prod", "min",
                                                                  "max", "and",  "or",   "xor"};

constexpr std::array<std::string_view, kOpCount> kOps{
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "send",   "recv",      "barrier",    "empty",  "group",   "join"};

// The name of a number from another process that stands for nothing.
constexpr std::string_view kUnknown = "unknown";

bool is_integer(DType dtype) { return dtype >= DType::kInt8 && dtype <= DType::kUInt64; }
bool is_complex(DType dtype) { return dtype >= DType::kComplex64; }

}  // namespace

std::size_t size_of(DType dtype) noexcept { return kDTypes[static_cast<std::size_t>(dtype)].bytes; }
std::string_view name_of(DType dtype) noexcept {
  const auto i = static_cast<std::size_t>(dtype);
  return i < kDTypes.size() ? kDTypes[i].name : kUnknown;
}
std::string_view name_of(ReduceOp op) noexcept {
  const auto i = static_cast<std::size_t>(op);
  return i < kReduceOps.size() ? kReduceOps[i] : kUnknown;
}
std::string_view name_of(Op op) noexcept {
  const auto i = static_cast<std::size_t>(op);
  return i < kOps.size() ? kOps[i] : kUnknown;
}

std::optional<DType> dtype_from_name(std::string_view name) noexcept {
  for (std::size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::optional<ReduceOp> reduce_op_from_name(std::string_view name) noexcept {
  const auto* found = std::find(kReduceOps.begin(), kReduceOps.end(), name);
  if (found == kReduceOps.end()) return std::nullopt;
  return static_cast<ReduceOp>(found - kReduceOps.begin());
}

std::optional<Op> op_from_name(std::string_view name) noexcept {
  const auto* found = std::find(kOps.begin(), kOps.end(), name);
  if (found == kOps.end()) return std::nullopt;
  return static_cast<Op>(found - kOps.begin());
}

void check_reducible(ReduceOp op, DType dtype) {
  const bool integer = is_integer(dtype);
  const bool boolean = dtype == DType::kBool;
  bool allowed = true;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProd:
      break;
    case ReduceOp::kMean:
      allowed = !integer && !boolean;
      break;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      allowed = !is_complex(dtype);
      break;
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      allowed = integer || boolean;
      break;
  }
  if (allowed) return;
  std::string message = "op=\"" + std::string(name_of(op)) + "\" is not defined for dtype " +
                        std::string(name_of(dtype));
  if (op == ReduceOp::kMean) message += "; cast to a floating dtype, or use op=\"sum\"";
  throw Error(ErrorCode::kType, message);
}

}  // namespace fastdist
