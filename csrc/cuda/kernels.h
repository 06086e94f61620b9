// Kernels: arrays into a bucket and out of it, casting and scaling on the way, and reductions that
// NCCL does not know. Everything is enqueued on a stream and returns at once.
#pragma once

#include <cstddef>

#include "core/types.h"
#include "cuda/moves.h"
#include "cuda/stream.h"

namespace fastdist::cuda {

// How the numbers of a bucket come from those of the arrays, which are of the bucket's dtype, or
// float32 and float64 in a bucket of a narrower floating dtype.
struct Cast {
  DType dtype;  // of the bucket
  // Unpacked numbers are multiplied by this: the mean's 1/n.
  float factor = 1.0F;
  // The largest magnitude of each array of the list on any rank, on the device; null: not scaled.
  // Arrays are scaled by the power of two that keeps a sum over `ranks` in the dtype's range.
  const float* magnitudes = nullptr;
  int ranks = 1;
};

// One launch each. Numbers that the narrower dtype cannot hold become infinite or NaN, as on CPUs.
void pack(const Moves& moves, std::byte* bucket, const Cast& cast, StreamHandle stream);
void unpack(const Moves& moves, const std::byte* bucket, const Cast& cast, StreamHandle stream);
// Raises `magnitudes`, one per array of the list, to the largest magnitude in these pieces. A NaN
// counts as larger than every number.
void measure(const Moves& moves, DType bucket_dtype, float* magnitudes, StreamHandle stream);

// out[i] = blocks[0][i] ∘ blocks[1][i] ∘ …, in that order; block k begins at k · stride. 16-bit and
// 8-bit floats accumulate in float32. All addresses and sizes are multiples of 16 bytes.
void reduce_blocks(DType dtype, ReduceOp op, const std::byte* blocks, std::size_t stride, int count,
                   std::byte* out, std::size_t bytes, StreamHandle stream);

}  // namespace fastdist::cuda
