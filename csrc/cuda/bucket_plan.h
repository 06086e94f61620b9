// Plans which pieces of a list's arrays share a bucket, and where each piece is in its bucket.
//
// Every rank must compute the same plan, so it depends on sizes and dtypes only, not on addresses.
// A bucket holds values of one dtype; each piece begins at a multiple of 16 bytes, so the bucket's
// side of every copy is aligned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/types.h"

namespace fastdist::cuda {

inline constexpr std::size_t kQuantumBytes = 16;
// The most pieces that one kernel launch can take as parameters (see Move).
inline constexpr std::size_t kMostPieces = 1024;
inline constexpr std::size_t kLargestBucket = std::size_t{1} << 30;

struct Piece {
  std::size_t array;  // index in the list
  std::size_t begin;  // first element, in that array
  std::size_t count;
  std::size_t at;  // offset in the bucket, in bytes
};

struct Bucket {
  DType dtype;  // of the bucket's values
  std::size_t bytes = 0;
  std::vector<Piece> pieces;
};

struct BucketPlan {
  std::vector<Bucket> buckets;
  std::vector<std::size_t>
      alone;  // indices of arrays that are too large to be copied into a bucket
};

// `wire`: the dtype that all arrays are cast to; no array is then `alone`. Arrays of one dtype keep
// the order of the list; empty arrays are skipped.
[[nodiscard]] BucketPlan plan_buckets(TensorViews arrays, std::optional<DType> wire,
                                      std::size_t bucket_bytes);

// --- parameters of a launch ---------------------------------------------------------------------

// The pieces of a bucket as parameters of one packing kernel launch. The table is a kernel
// parameter, so it needs no memory that must live until the kernel has run, and a captured launch
// has its own copy. Parameters may take 32 KiB (CUDA 12.1), which determines kMostPieces: every
// bucket takes exactly one launch.

// A thread moves one quantum of the bucket at a time, and a block of threads moves one tile.
inline constexpr std::uint32_t kTileQuanta = 1024;

struct Move {
  std::byte* array;          // the piece's first element
  std::uint32_t at;          // offset in the bucket, in quanta
  std::uint32_t count;       // elements
  std::uint32_t first_tile;  // index among all tiles of the launch, in the order of the moves
  std::uint32_t dtype;       // of the array
};
static_assert(sizeof(Move) == 24);

struct Moves {
  std::vector<Move> moves;
  std::uint32_t tiles = 0;
};

[[nodiscard]] Moves moves_of(const Bucket& bucket, TensorViews arrays);

}  // namespace fastdist::cuda
