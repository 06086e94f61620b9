// Copies arrays into and out of a bucket. A block of threads finds its piece by the number of its
// tile, and each thread moves a few quanta of 16 bytes of the bucket. If an array does not begin at
// a multiple of 16 bytes, or a piece ends within a quantum, its elements are moved one by one; the
// bucket's side is always aligned.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "cuda/check.h"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"

namespace fastdist::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kFewMoves = 64;
constexpr int kManyMoves = static_cast<int>(kMostPieces);

// The parameter of every kernel in this file. There are two sizes, since copying it is part of the
// cost of a launch.
template <int kCapacity>
struct Table {
  Move moves[kCapacity];
  int count;
  std::uint32_t item;  // bytes of the bucket's values
  std::byte* bucket;
  Cast cast;
};
static_assert(sizeof(Table<kManyMoves>) <= 32764);

enum class Direction { kPack, kUnpack };

__device__ bool is_aligned(const void* address, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

// Returns the move that a tile belongs to: the last one that begins at or before the tile.
template <int kCapacity>
__device__ const Move& move_of(const Table<kCapacity>& table, std::uint32_t tile) {
  int low = 0;
  int high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.moves[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return table.moves[low];
}

// --- Copies without casts ---------------------------------------------------------------------

// Copies `bytes` of one quantum word by word.
template <Direction kDirection, class Word>
__device__ void copy_words(std::byte* array, uint4* bucket, std::uint32_t bytes) {
  auto* a = reinterpret_cast<Word*>(array);
  auto* b = reinterpret_cast<Word*>(bucket);
  for (std::uint32_t i = 0; i < bytes / sizeof(Word); ++i) {
    if constexpr (kDirection == Direction::kPack) {
      b[i] = a[i];
    } else {
      a[i] = b[i];
    }
  }
}

template <Direction kDirection>
__device__ void copy_tile(const Move& move, std::uint32_t item, uint4* bucket,
                          std::uint32_t first) {
  const std::uint32_t bytes = move.count * item;
  const std::uint32_t whole = bytes / kQuantumBytes;
  const std::uint32_t end = min(first + kTileQuanta, (bytes + 15U) / 16U);
  const bool aligned = is_aligned(move.array, kQuantumBytes);
  if (aligned && first + kTileQuanta <= whole) {  // a full tile: load everything before storing
    constexpr int kEach = kTileQuanta / kThreads;
    uint4 held[kEach];
    auto* array = reinterpret_cast<uint4*>(move.array);
    const uint4* from = kDirection == Direction::kPack ? array : bucket;
    uint4* to = kDirection == Direction::kPack ? bucket : array;
#pragma unroll
    for (int k = 0; k < kEach; ++k) held[k] = from[first + k * kThreads + threadIdx.x];
#pragma unroll
    for (int k = 0; k < kEach; ++k) to[first + k * kThreads + threadIdx.x] = held[k];
    return;
  }
  for (std::uint32_t q = first + threadIdx.x; q < end; q += kThreads) {
    std::byte* array = move.array + std::size_t{q} * kQuantumBytes;
    const std::uint32_t here = q < whole ? 16U : bytes % 16U;
    if (aligned && q < whole) {
      copy_words<kDirection, uint4>(array, bucket + q, kQuantumBytes);
    } else if (here % 8 == 0 && is_aligned(array, 8)) {
      copy_words<kDirection, std::uint64_t>(array, bucket + q, here);
    } else if (here % 4 == 0 && is_aligned(array, 4)) {
      copy_words<kDirection, std::uint32_t>(array, bucket + q, here);
    } else if (here % 2 == 0 && is_aligned(array, 2)) {
      copy_words<kDirection, std::uint16_t>(array, bucket + q, here);
    } else {
      copy_words<kDirection, std::uint8_t>(array, bucket + q, here);
    }
  }
}

// --- Casts ------------------------------------------------------------------------------------

template <class Number, int kCount>
struct alignas(16) Numbers {
  Number values[kCount];
};

template <Direction kDirection, class Number, class Wire>
__device__ void cast_tile(const Move& move, uint4* bucket, std::uint32_t first, float scale) {
  constexpr std::uint32_t kEach = kQuantumBytes / sizeof(Wire);
  const std::uint32_t whole = move.count / kEach;
  const std::uint32_t end = min(first + kTileQuanta, (move.count + kEach - 1) / kEach);
  auto* const numbers = reinterpret_cast<Number*>(move.array);
  const bool aligned = is_aligned(numbers, 16);
  for (std::uint32_t q = first + threadIdx.x; q < end; q += kThreads) {
    Number* const array = numbers + std::size_t{q} * kEach;
    const std::uint32_t here = q < whole ? kEach : move.count - whole * kEach;
    Numbers<Number, kEach> wide;
    Numbers<Wire, kEach> narrow;
    if constexpr (kDirection == Direction::kPack) {
      if (aligned && here == kEach) {
        wide = *reinterpret_cast<const Numbers<Number, kEach>*>(array);
      } else {
#pragma unroll
        for (std::uint32_t i = 0; i < kEach; ++i) wide.values[i] = i < here ? array[i] : Number(0);
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kEach; ++i) {
        narrow.values[i] = Wire(static_cast<float>(wide.values[i]) * scale);
      }
      // Zeros fill the rest of the quantum, which belongs to this piece.
      *reinterpret_cast<Numbers<Wire, kEach>*>(bucket + q) = narrow;
    } else {
      narrow = *reinterpret_cast<const Numbers<Wire, kEach>*>(bucket + q);
#pragma unroll
      for (std::uint32_t i = 0; i < kEach; ++i) {
        wide.values[i] = Number(static_cast<float>(narrow.values[i]) * scale);
      }
      if (aligned && here == kEach) {
        *reinterpret_cast<Numbers<Number, kEach>*>(array) = wide;
      } else {
#pragma unroll
        for (std::uint32_t i = 0; i < kEach; ++i) {
          if (i < here) array[i] = wide.values[i];
        }
      }
    }
  }
}

template <Direction kDirection, class Wire>
__device__ void cast_from(const Move& move, uint4* bucket, std::uint32_t first, float scale) {
  if (static_cast<DType>(move.dtype) == DType::kFloat64) {
    cast_tile<kDirection, double, Wire>(move, bucket, first, scale);
  } else {
    cast_tile<kDirection, float, Wire>(move, bucket, first, scale);
  }
}

template <Direction kDirection, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    move_kernel(const Table<kCapacity> __grid_constant__ table) {
  const Move& move = move_of(table, blockIdx.x);
  const std::uint32_t first = (blockIdx.x - move.first_tile) * kTileQuanta;
  auto* const bucket = reinterpret_cast<uint4*>(table.bucket) + move.at;
  const DType wire = table.cast.dtype;
  if (static_cast<DType>(move.dtype) == wire) {
    if (kDirection == Direction::kPack || table.cast.factor == 1.0F) {
      return copy_tile<kDirection>(move, table.item, bucket, first);
    }
    if (wire == DType::kFloat32) {
      return cast_tile<kDirection, float, float>(move, bucket, first, table.cast.factor);
    }
    return cast_tile<kDirection, __nv_bfloat16, __nv_bfloat16>(move, bucket, first,
                                                               table.cast.factor);
  }
  const float scale = kDirection == Direction::kUnpack ? table.cast.factor : 1.0F;
  if (wire == DType::kFloat16) {
    cast_from<kDirection, __half>(move, bucket, first, scale);
  } else {
    cast_from<kDirection, __nv_bfloat16>(move, bucket, first, scale);
  }
}

// --- Launches ---------------------------------------------------------------------------------

template <int kCapacity, class Kernel>
void launch_on(Kernel kernel, const Moves& moves, std::byte* bucket, const Cast& cast,
               StreamHandle stream) {
  Table<kCapacity> table;  // moves beyond `count` stay uninitialized and are never read
  std::memcpy(table.moves, moves.moves.data(), moves.moves.size() * sizeof(Move));
  table.count = static_cast<int>(moves.moves.size());
  table.item = static_cast<std::uint32_t>(size_of(cast.dtype));
  table.bucket = bucket;
  table.cast = cast;
  launch(kernel, moves.tiles, kThreads, stream, table);
}

template <Direction kDirection>
void move_all(const Moves& moves, std::byte* bucket, const Cast& cast, StreamHandle stream) {
  if (moves.tiles == 0) return;
  if (moves.moves.size() <= kFewMoves) {
    launch_on<kFewMoves>(move_kernel<kDirection, kFewMoves>, moves, bucket, cast, stream);
  } else {
    launch_on<kManyMoves>(move_kernel<kDirection, kManyMoves>, moves, bucket, cast, stream);
  }
}

}  // namespace

void load_packing_kernels() {
  load(move_kernel<Direction::kPack, kFewMoves>);
  load(move_kernel<Direction::kPack, kManyMoves>);
  load(move_kernel<Direction::kUnpack, kFewMoves>);
  load(move_kernel<Direction::kUnpack, kManyMoves>);
}

void pack(const Moves& moves, std::byte* bucket, const Cast& cast, StreamHandle stream) {
  move_all<Direction::kPack>(moves, bucket, cast, stream);
}

void unpack(const Moves& moves, const std::byte* bucket, const Cast& cast, StreamHandle stream) {
  move_all<Direction::kUnpack>(moves, const_cast<std::byte*>(bucket), cast, stream);
}

}  // namespace fastdist::cuda
