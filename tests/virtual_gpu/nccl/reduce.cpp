// NCCL's dtypes and reductions, implemented by the loops of the host engine.

#include <cstdint>

#include "core/types.h"
#include "host/kernels.h"
#include "virtual_gpu/nccl/comm.h"

namespace virtual_nccl {
namespace {

using fastdist::DType;
using fastdist::ReduceOp;

DType dtype_of(abi::DataType type) {
  switch (type) {
    case abi::kInt8:
      return DType::kInt8;
    case abi::kUint8:
      return DType::kUInt8;
    case abi::kInt32:
      return DType::kInt32;
    case abi::kUint32:
      return DType::kUInt32;
    case abi::kInt64:
      return DType::kInt64;
    case abi::kUint64:
      return DType::kUInt64;
    case abi::kFloat16:
      return DType::kFloat16;
    case abi::kFloat32:
      return DType::kFloat32;
    case abi::kFloat64:
      return DType::kFloat64;
    case abi::kBfloat16:
      return DType::kBFloat16;
  }
  throw std::logic_error("a dtype that NCCL does not support");
}

ReduceOp reduce_op_of(abi::RedOp op) {
  switch (op) {
    case abi::kSum:
      return ReduceOp::kSum;
    case abi::kProd:
      return ReduceOp::kProd;
    case abi::kMax:
      return ReduceOp::kMax;
    case abi::kMin:
      return ReduceOp::kMin;
    case abi::kAvg:
      return ReduceOp::kMean;
  }
  throw std::logic_error("a reduction that NCCL does not support");
}

template <class T>
void divide(char* out, std::size_t count, std::size_t ranks) {
  auto* const numbers = reinterpret_cast<T*>(out);
  for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<T>(numbers[i] / T(ranks));
}

// Returns true for integers, whose mean the host engine lacks; NCCL rounds it towards zero.
bool divide_integers(abi::DataType type, char* out, std::size_t count, std::size_t ranks) {
  switch (type) {
    case abi::kInt8:
      return divide<std::int8_t>(out, count, ranks), true;
    case abi::kUint8:
      return divide<std::uint8_t>(out, count, ranks), true;
    case abi::kInt32:
      return divide<std::int32_t>(out, count, ranks), true;
    case abi::kUint32:
      return divide<std::uint32_t>(out, count, ranks), true;
    case abi::kInt64:
      return divide<std::int64_t>(out, count, ranks), true;
    case abi::kUint64:
      return divide<std::uint64_t>(out, count, ranks), true;
    case abi::kFloat16:
    case abi::kFloat32:
    case abi::kFloat64:
    case abi::kBfloat16:
      break;
  }
  return false;
}

bool is_floating(abi::DataType type) {
  return type == abi::kFloat16 || type == abi::kFloat32 || type == abi::kFloat64 ||
         type == abi::kBfloat16;
}

}  // namespace

bool is_known(abi::DataType type) { return type >= abi::kInt8 && type <= abi::kBfloat16; }

std::size_t size_of(abi::DataType type) { return fastdist::size_of(dtype_of(type)); }

void reduce(abi::DataType type, abi::RedOp op, char* out, const std::vector<const char*>& sources,
            std::size_t count) {
  std::vector<const std::byte*> blocks;
  for (const char* source : sources) blocks.push_back(reinterpret_cast<const std::byte*>(source));
  const bool is_integer_mean = op == abi::kAvg && !is_floating(type);
  fastdist::host::reduce(dtype_of(type), is_integer_mean ? ReduceOp::kSum : reduce_op_of(op),
                         reinterpret_cast<std::byte*>(out), nullptr, blocks, count);
  if (is_integer_mean) (void)divide_integers(type, out, count, sources.size());
}

}  // namespace virtual_nccl
