// Which parts of a list of arrays travel together, and where each lies in its bucket.
//
// Every rank must come to the same plan, so it follows from the sizes and dtypes alone and never
// from addresses. A bucket holds numbers of one dtype; each piece begins at a multiple of 16 bytes,
// so that the bucket's side of every copy is aligned whatever the arrays are.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "core/types.h"

namespace fastdist::cuda {

inline constexpr std::size_t kQuantumBytes = 16;
// Pieces of a bucket: as many as one kernel launch takes as parameters (see moves.h).
inline constexpr std::size_t kMostPieces = 1024;
inline constexpr std::size_t kLargestBucket = std::size_t{1} << 30;

struct Piece {
  std::size_t array;  // which of the list
  std::size_t begin;  // elements of that array
  std::size_t count;
  std::size_t at;  // bytes from the bucket's beginning
};

struct Bucket {
  DType dtype;  // of what lies in it
  std::size_t bytes = 0;
  std::vector<Piece> pieces;
};

struct BucketPlan {
  std::vector<Bucket> buckets;
  std::vector<std::size_t> alone;  // arrays that fill a bucket by themselves: used where they are
};

// `wire`: what all arrays are cast to, and none is alone then. Arrays of one dtype are gathered in
// the order of the list; empty arrays are left out.
[[nodiscard]] BucketPlan plan_buckets(TensorViews arrays, std::optional<DType> wire,
                                      std::size_t bucket_bytes);

// The arrays as one, where they have one dtype and follow each other in memory without a gap.
[[nodiscard]] std::optional<TensorView> as_one(TensorViews arrays);

}  // namespace fastdist::cuda
