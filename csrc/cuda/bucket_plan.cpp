#include "cuda/bucket_plan.h"

#include <algorithm>
#include <array>

namespace fastdist::cuda {
namespace {

// An array is cut at multiples of this many elements, so also of 16 bytes in any dtype.
constexpr std::size_t kCutElements = 16;

}  // namespace

BucketPlan plan_buckets(TensorViews arrays, std::optional<DType> wire, std::size_t bucket_bytes) {
  // The smallest bucket holds kCutElements of the widest dtype.
  constexpr std::size_t kSmallest = kCutElements * 16;
  const std::size_t limit =
      std::clamp(bucket_bytes, kSmallest, kLargestBucket) / kSmallest * kSmallest;
  BucketPlan plan;
  std::array<std::optional<std::size_t>, kDTypeCount> open;  // each dtype's last bucket
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    if (!wire && arrays[i].bytes() >= limit) {
      plan.alone.push_back(i);
      continue;
    }
    const DType dtype = wire.value_or(arrays[i].dtype);
    const std::size_t item = size_of(dtype);
    auto& index = open[static_cast<std::size_t>(dtype)];
    // Only an array's last piece may be below kCutElements.
    for (std::size_t done = 0; done < arrays[i].count;) {
      const std::size_t left = arrays[i].count - done;
      const Bucket* const last = index ? &plan.buckets[*index] : nullptr;
      std::size_t room =
          last == nullptr || last->pieces.size() == kMostPieces ? 0 : limit - last->bytes;
      if (room < std::min(left, kCutElements) * item) {
        index = plan.buckets.size();
        plan.buckets.push_back({dtype, 0, {}});
        room = limit;
      }
      const std::size_t fitting = room / item / kCutElements * kCutElements;
      const std::size_t count = left * item <= room ? left : fitting;
      Bucket& bucket = plan.buckets[*index];
      bucket.pieces.push_back({i, done, count, bucket.bytes});
      bucket.bytes += round_up(count * item, kQuantumBytes);
      done += count;
    }
  }
  return plan;
}

// --- parameters of a launch ---------------------------------------------------------------------

Moves moves_of(const Bucket& bucket, TensorViews arrays) {
  Moves result;
  result.moves.reserve(bucket.pieces.size());
  for (const Piece& piece : bucket.pieces) {
    const TensorView& array = arrays[piece.array];
    const std::size_t bytes = piece.count * size_of(bucket.dtype);
    const std::size_t quanta = round_up(bytes, kQuantumBytes) / kQuantumBytes;
    Move move{};
    move.array = array.data + piece.begin * size_of(array.dtype);
    move.at = static_cast<std::uint32_t>(piece.at / kQuantumBytes);
    move.count = static_cast<std::uint32_t>(piece.count);
    move.first_tile = result.tiles;
    move.dtype = static_cast<std::uint32_t>(array.dtype);
    result.moves.push_back(move);
    result.tiles += static_cast<std::uint32_t>((quanta + kTileQuanta - 1) / kTileQuanta);
  }
  return result;
}

}  // namespace fastdist::cuda
