// all_reduce with fewer bytes: values are sent in a narrower floating format.
#pragma once

#include "core/communicator.h"

namespace fastdist::host {

// Takes float32 and float64 arrays, sum and mean. Inputs are rounded to `wire`, reduced in float32,
// and the result is rounded to `wire` again; every rank gets the same bits. For float8 each array
// is scaled by a power of two so that the reduced values fit its range.
void all_reduce_compressed(Communicator& communicator, TensorViews in, TensorViews out, ReduceOp op,
                           DType wire, const CallOptions& options);

}  // namespace fastdist::host
