// A plain CPU implementation of the packing kernels, used as their reference in tests and as the
// kernels of virtual GPUs. Blocks and threads are loops; moves are found by tile, as in the
// kernels.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cuda/bucket_plan.h"
#include "host/kernels.h"

namespace fastdist::test {

// Calls f(move, quantum index in the move) for each quantum of each tile of a launch.
template <class F>
void for_each_quantum(const cuda::Moves& moves, DType bucket_dtype, F&& f) {
  for (std::uint32_t tile = 0; tile < moves.tiles; ++tile) {
    auto after = std::upper_bound(
        moves.moves.begin(), moves.moves.end(), tile,
        [](std::uint32_t t, const cuda::Move& move) { return t < move.first_tile; });
    if (after == moves.moves.begin()) throw std::logic_error("a tile before the first move");
    const cuda::Move& move = *(after - 1);
    const std::size_t bytes = move.count * size_of(bucket_dtype);
    const std::size_t quanta = (bytes + cuda::kQuantumBytes - 1) / cuda::kQuantumBytes;
    const std::size_t first = std::size_t{tile - move.first_tile} * cuda::kTileQuanta;
    if (first >= quanta) throw std::logic_error("a tile behind the end of its move");
    for (std::size_t q = first; q < std::min(quanta, first + cuda::kTileQuanta); ++q) f(move, q);
  }
}

// One quantum of a move: elements `first` to `first + count` of its array, and its place in the
// bucket.
struct Part {
  std::byte* array;
  std::byte* bucket;
  std::size_t count;
  DType dtype;
};

inline Part part_of(const cuda::Move& move, std::size_t quantum, std::byte* bucket, DType wire) {
  const auto dtype = static_cast<DType>(move.dtype);
  const std::size_t each = cuda::kQuantumBytes / size_of(wire);
  return {move.array + quantum * each * size_of(dtype),
          bucket + (move.at + quantum) * cuda::kQuantumBytes,
          std::min(each, move.count - quantum * each), dtype};
}

inline void pack_twin(const cuda::Moves& moves, std::byte* bucket, DType wire) {
  for_each_quantum(moves, wire, [&](const cuda::Move& move, std::size_t quantum) {
    const Part part = part_of(move, quantum, bucket, wire);
    if (part.dtype == wire) {
      std::memcpy(part.bucket, part.array, part.count * size_of(wire));
    } else {
      host::convert(wire, part.bucket, part.dtype, part.array, part.count, 1.0F);
    }
  });
}

inline void unpack_twin(const cuda::Moves& moves, std::byte* bucket, DType wire, float factor) {
  for_each_quantum(moves, wire, [&](const cuda::Move& move, std::size_t quantum) {
    const Part part = part_of(move, quantum, bucket, wire);
    if (part.dtype == wire && factor == 1.0F) {
      std::memcpy(part.array, part.bucket, part.count * size_of(wire));
    } else {
      host::convert(part.dtype, part.array, wire, part.bucket, part.count, factor);
    }
  });
}

}  // namespace fastdist::test
