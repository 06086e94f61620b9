// Kernels that copy arrays into and out of buckets, with casts. All functions enqueue work on a
// stream and return immediately.
#pragma once

#include <cstddef>

#include "core/types.h"
#include "cuda/bucket_plan.h"
#include "cuda/stream.h"

namespace fastdist::cuda {

// The conversion between arrays and bucket. The arrays have the bucket's dtype, or are float32 or
// float64 with a bucket of a dtype of `compress`. Of arrays with the bucket's dtype, only
// float32 and bfloat16 can be scaled.
struct Cast {
  DType dtype;  // of the bucket
  // Multiplies unpacked values: 1/n for a mean.
  float factor = 1.0F;
};

// Loads the kernels onto the current device. Loading at their first launch could wait for an NCCL
// kernel that waits for other ranks, or fail in a capture.
void load_packing_kernels();

// Use one launch each. Values that the narrower dtype cannot represent become infinite or NaN, as
// on CPUs.
void pack(const Moves& moves, std::byte* bucket, const Cast& cast, StreamHandle stream);
void unpack(const Moves& moves, const std::byte* bucket, const Cast& cast, StreamHandle stream);

}  // namespace fastdist::cuda
