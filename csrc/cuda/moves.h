// The pieces of a bucket as parameters of one packing kernel launch.
//
// The table is a kernel parameter, so it needs no memory that must live until the kernel has run,
// and a captured launch has its own copy. Parameters may take 32 KiB (CUDA 12.1), which determines
// kMostPieces: every bucket takes exactly one launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"
#include "cuda/bucket_plan.h"

namespace fastdist::cuda {

// A thread moves one quantum of the bucket at a time, and a block of threads moves one tile.
inline constexpr std::uint32_t kTileQuanta = 1024;

struct Move {
  std::byte* array;          // the piece's first element
  std::uint32_t at;          // offset in the bucket, in quanta
  std::uint32_t count;       // elements
  std::uint32_t first_tile;  // index among all tiles of the launch, in the order of the moves
  std::uint32_t index : 24;  // of the array in the list, and of its magnitude
  std::uint32_t dtype : 8;   // of the array
};
static_assert(sizeof(Move) == 24);

struct Moves {
  std::vector<Move> moves;
  std::uint32_t tiles = 0;
};

[[nodiscard]] Moves moves_of(const Bucket& bucket, TensorViews arrays);

}  // namespace fastdist::cuda
