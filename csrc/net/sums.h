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
[[nodiscard]] inline TensorView view_of(std::byte* data, std::size_t count, DType dtype) noexcept {
  return {data, count, dtype, 0};
}
// Divides the sums by the number of ranks for a mean, and converts them to the arrays' dtype.
void finish_sums(DType wide, ReduceOp op, std::size_t ranks, std::byte* sums, DType dtype,
                 std::byte* to, std::size_t count);

}  // namespace fastdist::net
