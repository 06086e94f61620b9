// The reductions that NCCL has.
#pragma once

#include <cstddef>

#include "core/types.h"
#include "nccl/abi.h"

namespace fastdist::nccl {

struct NativeReduction {
  abi::DataType type;
  abi::RedOp op;
  std::size_t per_element = 1;  // numbers of `type` per element
};

// Throws for reductions that NCCL lacks: and, or and xor of integers; xor of bools; 16-bit
// integers; products of complex numbers; and 8-bit floats, which NCCL would round after every rank.
[[nodiscard]] NativeReduction native_reduction(DType dtype, ReduceOp op);

}  // namespace fastdist::nccl
