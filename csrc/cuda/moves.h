// What one launch of a packing kernel is told about the pieces of a bucket.
//
// The table goes to the device as a parameter of the kernel: it needs no memory that would have to
// live until the kernel has run, and a captured launch holds its own copy. Parameters may take
// 32 KiB (CUDA 12.1), which is what kMostPieces comes from: one launch per bucket, always.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"
#include "cuda/bucket_plan.h"

namespace fastdist::cuda {

// A thread moves a quantum of the bucket at a time, a block of threads a tile.
inline constexpr std::uint32_t kTileQuanta = 1024;

struct Move {
  std::byte* array;          // the piece's first element
  std::uint32_t at;          // where it lies in the bucket, in quanta
  std::uint32_t count;       // elements
  std::uint32_t first_tile;  // of all tiles of the launch, in the order of the moves
  std::uint32_t index : 24;  // of the array in the list, which is where its magnitude is found
  std::uint32_t dtype : 8;   // of the array
};
static_assert(sizeof(Move) == 24);

struct Moves {
  std::vector<Move> moves;
  std::uint32_t tiles = 0;
};

[[nodiscard]] Moves moves_of(const Bucket& bucket, TensorViews arrays);

}  // namespace fastdist::cuda
