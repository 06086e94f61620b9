#include "nccl/reductions.h"

#include <optional>

#include "core/error.h"

namespace fastdist::nccl {
namespace {

// The tables have an entry for each enumerator, in order.
static_assert(kDTypeCount == 17 && kReduceOpCount == 8);

constexpr std::optional<abi::DataType> kNumbers[kDTypeCount] = {
    abi::kUint8,     // bool
    abi::kInt8,      // int8
    std::nullopt,    // int16
    abi::kInt32,     // int32
    abi::kInt64,     // int64
    abi::kUint8,     // uint8
    std::nullopt,    // uint16
    abi::kUint32,    // uint32
    abi::kUint64,    // uint64
    abi::kFloat16,   // float16
    abi::kBfloat16,  // bfloat16
    std::nullopt,    // float8_e4m3fn
    std::nullopt,    // float8_e5m2
    abi::kFloat32,   // float32
    abi::kFloat64,   // float64
    abi::kFloat32,   // complex64
    abi::kFloat64,   // complex128
};

// NCCL's operations for sum, mean, prod, min, max, and, or and xor. Bools are bytes 0 and 1: a sum
// is the maximum, a product the minimum.
using Ops = std::optional<abi::RedOp>[kReduceOpCount];
constexpr Ops kOpsOfNumbers = {abi::kSum, abi::kAvg, abi::kProd, abi::kMin, abi::kMax, {}, {}, {}};
constexpr Ops kOpsOfBools = {abi::kMax, {},        abi::kMin, abi::kMin,
                             abi::kMax, abi::kMin, abi::kMax, {}};

}  // namespace

NativeReduction native_reduction(DType dtype, ReduceOp op) {
  const auto type = kNumbers[static_cast<int>(dtype)];
  const bool is_complex = dtype >= DType::kComplex64;
  const Ops& ops = dtype == DType::kBool ? kOpsOfBools : kOpsOfNumbers;
  const auto native = ops[static_cast<int>(op)];
  // A complex product is not the product of the parts.
  if (!type || !native || (is_complex && op == ReduceOp::kProd)) {
    refuse(ErrorCode::kUnsupported, "op=\"", name_of(op), "\" of ", name_of(dtype),
           " is not supported on GPUs, since NCCL lacks it; reduce a copy in host memory, such as "
           "x.cpu()");
  }
  return {*type, *native, is_complex ? std::size_t{2} : std::size_t{1}};
}

}  // namespace fastdist::nccl
