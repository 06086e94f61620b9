// Checks the arguments of collectives, for every engine.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bindings/array.h"
#include "core/signature.h"
#include "core/types.h"

namespace fastdist::bindings {

[[nodiscard]] ReduceOp to_reduce_op(pybind11::handle name);
// Returns the dtype that `compress` names.
[[nodiscard]] DType to_wire_dtype(pybind11::handle name);

void check_reducible_all(ReduceOp op, TensorViews arrays);
void check_row_major(const Arrays& arrays);
// Throws unless `whole` has `ranks` times the elements of `part`. The two do not share memory, or
// `part` is the place of this rank in `whole`.
void check_sizes(const char* op, const Arrays& part, const Arrays& whole, int rank, int ranks);
// `counts` has, for each array, the elements from each of n ranks to each rank; empty means equal
// parts. Checks the arrays of rank r.
void check_all_to_all(const Arrays& in, const Arrays& to, const std::vector<std::size_t>& counts,
                      std::size_t n, std::size_t r);

}  // namespace fastdist::bindings
