#include "nccl/reductions.h"

#include <optional>

#include "core/error.h"

namespace fastdist::nccl {
namespace {

struct Numbers {
  abi::DataType type;
  std::size_t per_element;
};

// The tables have an entry for each enumerator, in order.
static_assert(kDTypeCount == 17 && kReduceOpCount == 8);

constexpr std::optional<Numbers> kNumbers[kDTypeCount] = {
    Numbers{abi::kUint8, 1},     // bool
    Numbers{abi::kInt8, 1},      // int8
    std::nullopt,                // int16
    Numbers{abi::kInt32, 1},     // int32
    Numbers{abi::kInt64, 1},     // int64
    Numbers{abi::kUint8, 1},     // uint8
    std::nullopt,                // uint16
    Numbers{abi::kUint32, 1},    // uint32
    Numbers{abi::kUint64, 1},    // uint64
    Numbers{abi::kFloat16, 1},   // float16
    Numbers{abi::kBfloat16, 1},  // bfloat16
    std::nullopt,                // float8_e4m3fn
    std::nullopt,                // float8_e5m2
    Numbers{abi::kFloat32, 1},   // float32
    Numbers{abi::kFloat64, 1},   // float64
    Numbers{abi::kFloat32, 2},   // complex64
    Numbers{abi::kFloat64, 2},   // complex128
};

// NCCL's operations for sum, mean, prod, min, max, and, or and xor. Bools are bytes 0 and 1: a sum
// is the maximum, a product the minimum.
using Ops = std::optional<abi::RedOp>[kReduceOpCount];
constexpr Ops kOpsOfNumbers = {abi::kSum, abi::kAvg, abi::kProd, abi::kMin, abi::kMax, {}, {}, {}};
constexpr Ops kOpsOfBools = {abi::kMax, {},        abi::kMin, abi::kMin,
                             abi::kMax, abi::kMin, abi::kMax, {}};

}  // namespace

NativeReduction native_reduction(DType dtype, ReduceOp op) {
  const auto& numbers = kNumbers[static_cast<int>(dtype)];
  const Ops& ops = dtype == DType::kBool ? kOpsOfBools : kOpsOfNumbers;
  const auto native = ops[static_cast<int>(op)];
  // A complex product is not the product of the parts.
  if (!numbers || !native || (numbers->per_element == 2 && op == ReduceOp::kProd)) {
    refuse(ErrorCode::kUnsupported, "op=\"", name_of(op), "\" of ", name_of(dtype),
           " is not supported on GPUs, since NCCL lacks it; reduce a copy in host memory, such as "
           "x.cpu()");
  }
  return {numbers->type, *native, numbers->per_element};
}

}  // namespace fastdist::nccl
