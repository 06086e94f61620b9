#include "cuda/moves.h"

#include "core/error.h"

namespace fastdist::cuda {

Moves moves_of(const Bucket& bucket, TensorViews arrays) {
  constexpr std::size_t kMostArrays = std::size_t{1} << 24;
  if (arrays.size() > kMostArrays) {
    throw Error(ErrorCode::kValue,
                "a list may hold at most 2^24 arrays, got " + std::to_string(arrays.size()));
  }
  Moves result;
  result.moves.reserve(bucket.pieces.size());
  for (const Piece& piece : bucket.pieces) {
    const TensorView& array = arrays[piece.array];
    const std::size_t bytes = piece.count * size_of(bucket.dtype);
    const std::size_t quanta = (bytes + kQuantumBytes - 1) / kQuantumBytes;
    Move move{};
    move.array = array.data + piece.begin * size_of(array.dtype);
    move.at = static_cast<std::uint32_t>(piece.at / kQuantumBytes);
    move.count = static_cast<std::uint32_t>(piece.count);
    move.first_tile = result.tiles;
    move.index = static_cast<std::uint32_t>(piece.array) & 0xFFFFFFU;
    move.dtype = static_cast<std::uint8_t>(array.dtype);
    result.moves.push_back(move);
    result.tiles += static_cast<std::uint32_t>((quanta + kTileQuanta - 1) / kTileQuanta);
  }
  return result;
}

}  // namespace fastdist::cuda
