#include "nccl/reductions.h"

namespace fastdist::nccl {
namespace {

struct Numbers {
  abi::DataType type;
  std::size_t per_element;
};

std::optional<Numbers> numbers_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return Numbers{abi::kUint8, 1};
    case DType::kInt8:
      return Numbers{abi::kInt8, 1};
    case DType::kInt32:
      return Numbers{abi::kInt32, 1};
    case DType::kInt64:
      return Numbers{abi::kInt64, 1};
    case DType::kUInt32:
      return Numbers{abi::kUint32, 1};
    case DType::kUInt64:
      return Numbers{abi::kUint64, 1};
    case DType::kFloat16:
      return Numbers{abi::kFloat16, 1};
    case DType::kBFloat16:
      return Numbers{abi::kBfloat16, 1};
    case DType::kFloat32:
      return Numbers{abi::kFloat32, 1};
    case DType::kFloat64:
      return Numbers{abi::kFloat64, 1};
    case DType::kComplex64:
      return Numbers{abi::kFloat32, 2};
    case DType::kComplex128:
      return Numbers{abi::kFloat64, 2};
    case DType::kInt16:
    case DType::kUInt16:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
      return std::nullopt;
  }
  return std::nullopt;
}

// Bools are bytes 0 and 1: a sum is the maximum, a product the minimum.
std::optional<abi::RedOp> op_of_bools(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kOr:
      return abi::kMax;
    case ReduceOp::kProd:
    case ReduceOp::kMin:
    case ReduceOp::kAnd:
      return abi::kMin;
    case ReduceOp::kMean:
    case ReduceOp::kXor:
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<abi::RedOp> op_of_numbers(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return abi::kSum;
    case ReduceOp::kMean:
      return abi::kAvg;
    case ReduceOp::kProd:
      return abi::kProd;
    case ReduceOp::kMin:
      return abi::kMin;
    case ReduceOp::kMax:
      return abi::kMax;
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

std::optional<NativeReduction> native_reduction(DType dtype, ReduceOp op) {
  const auto numbers = numbers_of(dtype);
  if (!numbers) return std::nullopt;
  const auto native = dtype == DType::kBool ? op_of_bools(op) : op_of_numbers(op);
  // A complex product is not the product of the parts.
  if (!native || (numbers->per_element == 2 && op == ReduceOp::kProd)) return std::nullopt;
  return NativeReduction{numbers->type, *native, numbers->per_element};
}

}  // namespace fastdist::nccl
