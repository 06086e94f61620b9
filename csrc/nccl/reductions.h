// Which reductions NCCL does by itself.
#pragma once

#include <cstddef>
#include <optional>

#include "core/types.h"
#include "nccl/abi.h"

namespace fastdist::nccl {

struct NativeReduction {
  abi::DataType type;
  abi::RedOp op;
  std::size_t per_element = 1;  // numbers of that type
};

// Nothing where NCCL has no such reduction: and, or, xor of integers; 16-bit integers; products of
// complex numbers; and 8-bit floats, which NCCL would round after every rank. Those are done by an
// exchange of parts and a kernel (exchange.cpp).
[[nodiscard]] std::optional<NativeReduction> native_reduction(DType dtype, ReduceOp op);

}  // namespace fastdist::nccl
