#include "table/row_arena.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/error.h"

namespace fastdist::table {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{16} << 20;
constexpr std::size_t kLeastBlockRows = 4096;
constexpr const char* kWhat = "a table's rows";

std::size_t block_rows(std::size_t stride) {
  return std::bit_floor(std::max(kBlockBytes / stride, kLeastBlockRows));
}

}  // namespace

RowArena::RowArena(std::size_t stride)
    : stride_(stride),
      block_bits_(static_cast<unsigned>(std::countr_zero(block_rows(stride)))),
      block_mask_(static_cast<RowNumber>(block_rows(stride) - 1)),
      block_array_(allocate((kMaxRows >> block_bits_) * sizeof(std::byte*), Pages::kSmall, kWhat)) {
}

RowNumber RowArena::take(std::uint32_t count) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t first = taken_.load(std::memory_order_relaxed);
  const std::uint64_t end = first + count;
  if (end > kMaxRows) throw Error(ErrorCode::kMemory, "a table holds at most 2^31 rows");
  while (owned_.size() << block_bits_ < end) {
    // Small pages for the first block: a small table should not take a huge page.
    const Pages pages = owned_.empty() ? Pages::kSmall : Pages::kHuge;
    owned_.reserve(owned_.size() + 1);
    owned_.push_back(allocate((std::size_t{1} << block_bits_) * stride_, pages, kWhat));
    blocks()[owned_.size() - 1] = owned_.back().get();
  }
  taken_.store(end, std::memory_order_relaxed);
  return static_cast<RowNumber>(first);
}

}  // namespace fastdist::table
