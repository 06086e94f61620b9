// Kernels that copy arrays into and out of buckets, with casts and scaling, and reductions that
// NCCL lacks. All functions enqueue work on a stream and return immediately.
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
  // On the device: the largest magnitude of each array of the list on any rank; null: no scaling.
  // Arrays are scaled by a power of two that keeps a sum over `ranks` ranks in the dtype's range.
  const float* magnitudes = nullptr;
  int ranks = 1;
};

// Load the kernels onto the current device. Loading at their first launch could wait for an NCCL
// kernel that waits for other ranks, or fail in a capture.
void load_packing_kernels();
void load_reduction_kernels();

// Use one launch each. Values that the narrower dtype cannot represent become infinite or NaN, as
// on CPUs.
void pack(const Moves& moves, std::byte* bucket, const Cast& cast, StreamHandle stream);
void unpack(const Moves& moves, const std::byte* bucket, const Cast& cast, StreamHandle stream);
// Raises `magnitudes`, one per array of the list, to the largest magnitude in the pieces of
// `moves`. A NaN counts as larger than every number.
void measure(const Moves& moves, DType bucket_dtype, float* magnitudes, StreamHandle stream);

// Reduces the elements of `count` blocks, at most 4,096, by the tree over their numbers
// (core/reduction_tree.h); block k begins at k · stride. 16-bit and 8-bit floats accumulate in
// float32. All addresses and sizes must be multiples of 16 bytes.
void reduce_blocks(DType dtype, ReduceOp op, const std::byte* blocks, std::size_t stride, int count,
                   std::byte* out, std::size_t bytes, StreamHandle stream);

}  // namespace fastdist::cuda
