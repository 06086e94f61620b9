#include "core/types.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace fastdist {
namespace {

template <std::size_t kCount>
using Names = std::array<std::string_view, kCount>;

constexpr Names<kDTypeCount> kDTypes{
    "bool",        "int8",    "int16",   "int32",     "int64",     "uint8",
    "uint16",      "uint32",  "uint64",  "float16",   "bfloat16",  "float8_e4m3fn",
    "float8_e5m2", "float32", "float64", "complex64", "complex128"};
constexpr std::array<std::size_t, kDTypeCount> kDTypeBytes{1, 1, 2, 4, 8, 1, 2, 4, 8,
                                                           2, 2, 1, 1, 4, 8, 8, 16};

constexpr Names<kReduceOpCount> kReduceOps{"sum", "mean", "prod", "min", "max", "and", "or", "xor"};

constexpr Names<kOpCount> kOps{
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send",
    "recv",
    "barrier",
    "empty",
    "group",
    "join",
    "scan",
    "broadcast_object",
    "all_gather_object",
    "gather_object",
    "scatter_object",
    "split",
    "all_gather_splits",
    "gather_splits",
    "scatter_splits",
    "reduce_scatter_splits",
    "all_to_all_splits",
};

// The name of a number from another process that stands for nothing.
constexpr std::string_view kUnknown = "unknown";

template <class Enum, std::size_t kCount>
std::string_view name_in(const Names<kCount>& names, Enum value) {
  const auto i = static_cast<std::size_t>(value);
  return i < kCount ? names[i] : kUnknown;
}

template <class Enum, std::size_t kCount>
std::optional<Enum> find_in(const Names<kCount>& names, std::string_view name) {
  const auto* found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return std::nullopt;
  return static_cast<Enum>(found - names.begin());
}

bool is_integer(DType dtype) { return dtype >= DType::kInt8 && dtype <= DType::kUInt64; }
bool is_complex(DType dtype) { return dtype >= DType::kComplex64; }

}  // namespace

std::size_t size_of(DType dtype) noexcept { return kDTypeBytes[static_cast<std::size_t>(dtype)]; }
std::string_view name_of(DType dtype) noexcept { return name_in(kDTypes, dtype); }
std::string_view name_of(ReduceOp op) noexcept { return name_in(kReduceOps, op); }
std::string_view name_of(Op op) noexcept { return name_in(kOps, op); }

std::optional<DType> dtype_from_name(std::string_view name) noexcept {
  return find_in<DType>(kDTypes, name);
}
std::optional<ReduceOp> reduce_op_from_name(std::string_view name) noexcept {
  return find_in<ReduceOp>(kReduceOps, name);
}
std::optional<Op> op_from_name(std::string_view name) noexcept { return find_in<Op>(kOps, name); }

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
