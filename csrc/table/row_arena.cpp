#include "table/row_arena.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace fastdist::table {

constexpr std::size_t kFirstBlockBytes = std::size_t{64} << 10;

RowArena::RowArena(std::size_t stride)
    : stride_(stride),
      first_bits_(static_cast<unsigned>(
          std::bit_width(std::max<std::size_t>(kFirstBlockBytes / stride, 1)) - 1)) {}

RowNumber RowArena::take(std::uint32_t count) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t first = taken_.load(std::memory_order_relaxed);
  const std::uint64_t end = first + count;
  if (end > std::numeric_limits<RowNumber>::max()) {
    throw Error(ErrorCode::kMemory, "a table holds at most 2^32 - 1 rows");
  }
  for (unsigned block = 0; block < blocks_.size() && first_row(block) < end; ++block) {
    if (blocks_[block]) continue;
    const std::size_t rows = first_row(block + 1) - first_row(block);
    blocks_[block] = allocate(rows * stride_, "a table's rows");
  }
  taken_.store(end, std::memory_order_relaxed);
  return static_cast<RowNumber>(first);
}

}  // namespace fastdist::table
