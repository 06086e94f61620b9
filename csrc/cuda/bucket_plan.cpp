#include "cuda/bucket_plan.h"

#include <algorithm>

namespace fastdist::cuda {
namespace {

// An array is cut at multiples of this many elements, so also of 16 bytes in any dtype.
constexpr std::size_t kCutElements = 16;

// Adds pieces to the buckets of one dtype. Only an array's last piece may be below kCutElements.
class Filler {
 public:
  Filler(std::vector<Bucket>& buckets, DType dtype, std::size_t limit)
      : buckets_(buckets), dtype_(dtype), limit_(limit) {}

  void add(std::size_t array, std::size_t elements) {
    const std::size_t item = size_of(dtype_);
    for (std::size_t done = 0; done < elements;) {
      const std::size_t left = elements - done;
      std::size_t room = room_left();
      if (room < std::min(left * item, kCutElements * item)) {
        buckets_.push_back({dtype_, 0, {}});
        current_ = buckets_.size();
        room = limit_;
      }
      const std::size_t fitting = room / item / kCutElements * kCutElements;
      const std::size_t count = left * item <= room ? left : fitting;
      Bucket& bucket = buckets_[current_ - 1];
      bucket.pieces.push_back({array, done, count, bucket.bytes});
      bucket.bytes += round_up(count * item, kQuantumBytes);
      done += count;
    }
  }

 private:
  [[nodiscard]] std::size_t room_left() const {
    if (current_ == 0) return 0;
    const Bucket& bucket = buckets_[current_ - 1];
    return bucket.pieces.size() < kMostPieces ? limit_ - bucket.bytes : 0;
  }

  std::vector<Bucket>& buckets_;
  DType dtype_;
  std::size_t limit_;
  std::size_t current_ = 0;  // index + 1 of the open bucket, or 0
};

}  // namespace

BucketPlan plan_buckets(TensorViews arrays, std::optional<DType> wire, std::size_t bucket_bytes) {
  // The smallest bucket holds kCutElements of the widest dtype.
  constexpr std::size_t kSmallest = kCutElements * 16;
  const std::size_t limit =
      std::clamp(bucket_bytes, kSmallest, kLargestBucket) / kSmallest * kSmallest;
  BucketPlan plan;
  std::vector<Filler> fillers;
  std::vector<std::optional<std::size_t>> filler_of(kDTypeCount);
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i].count == 0) continue;
    if (!wire && arrays[i].bytes() >= limit) {
      plan.alone.push_back(i);
      continue;
    }
    const DType dtype = wire.value_or(arrays[i].dtype);
    auto& index = filler_of[static_cast<std::size_t>(dtype)];
    if (!index) {
      index = fillers.size();
      fillers.emplace_back(plan.buckets, dtype, limit);
    }
    fillers[*index].add(i, arrays[i].count);
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
