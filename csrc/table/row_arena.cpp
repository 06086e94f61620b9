#include "table/row_arena.h"

#include <algorithm>
#include <bit>

#include "table/refuse.h"

namespace fastdist::table {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{16} << 20;
constexpr std::size_t kLeastBlockRows = 4096;
// A larger mapping has too many rows to use all of them soon, and a huge page for each used row
// would take long to clear and need more memory than the rows.
constexpr std::size_t kMostHugeBytes = std::size_t{1} << 30;
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
  if (end > kMaxRows) refuse(ErrorCode::kMemory, "a table holds at most 2^31 rows");
  const std::size_t needed = (end + block_mask_) >> block_bits_;
  if (blocks_used_ < needed) {
    const std::size_t block_bytes = stride_ << block_bits_;
    const std::size_t bytes = (needed - blocks_used_) * block_bytes;
    // Small pages for a single first block: a small table should not take a huge page.
    const bool is_small = needed == 1;
    const Pages pages = is_small || bytes > kMostHugeBytes ? Pages::kSmall : Pages::kHuge;
    owned_.push_back(allocate(bytes, pages, kWhat));
    for (std::byte* block = owned_.back().get(); blocks_used_ < needed; block += block_bytes) {
      blocks()[blocks_used_++] = block;
    }
  }
  taken_.store(end, std::memory_order_relaxed);
  return static_cast<RowNumber>(first);
}

}  // namespace fastdist::table
