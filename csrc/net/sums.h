// Sums that cross between machines: small floats in float32, so that they are rounded once, and
// means as sums.
#pragma once

#include <cstddef>

#include "core/types.h"

namespace fastdist::net {

[[nodiscard]] DType dtype_of_sums(DType dtype) noexcept;
[[nodiscard]] inline ReduceOp summed(ReduceOp op) noexcept {
  return op == ReduceOp::kMean ? ReduceOp::kSum : op;
}
// Converts results to the arrays' dtype.
void narrow(DType wide, const std::byte* from, DType dtype, std::byte* to, std::size_t count);

}  // namespace fastdist::net
