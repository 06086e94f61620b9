// Zeroed memory for tables.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/types.h"

namespace fastdist::table {

struct MemoryRelease {
  std::size_t mapped_bytes = 0;  // 0 for memory from malloc
  void operator()(std::byte* data) const noexcept;
};
using Memory = std::unique_ptr<std::byte, MemoryRelease>;

// Huge pages, if the kernel provides them, make random accesses faster, but memory is committed in
// larger units.
enum class Pages { kSmall, kHuge };

// Allocates zeroed memory aligned to cache lines. Large memory is committed page by page when
// touched. Throws kMemory; `what` names the purpose.
[[nodiscard]] Memory allocate(std::size_t bytes, Pages pages, const char* what);

using RowNumber = std::uint32_t;
inline constexpr std::size_t kMaxRows = std::size_t{1} << 31;

// The memory of a table's rows, which have numbers and never move.
//
// Rows are in blocks of equal size; a block's pages are committed when its rows are used. The
// blocks of one call of take() are one mapping: the kernel limits the number of mappings.
//
// take() locks; row() does not, since a thread that knows a row's number got it after take() had
// returned, through the lock of a stripe. The array of blocks is allocated at its maximum size, so
// that it never moves; only its used part is committed.
class RowArena {
 public:
  explicit RowArena(std::size_t stride);

  // Returns the first of `count` consecutive new rows, with zeroed memory. Throws kMemory.
  RowNumber take(std::uint32_t count);
  [[nodiscard]] std::byte* row(RowNumber number) const noexcept {
    return blocks()[number >> block_bits_] + (number & block_mask_) * stride_;
  }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return taken_.load(std::memory_order_relaxed) * stride_;
  }

 private:
  [[nodiscard]] std::byte** blocks() const noexcept {
    return reinterpret_cast<std::byte**>(block_array_.get());
  }

  std::size_t stride_;
  unsigned block_bits_;
  RowNumber block_mask_;
  Memory block_array_;
  std::mutex mutex_;
  std::vector<Memory> owned_;            // guarded by mutex_
  std::size_t blocks_used_ = 0;          // guarded by mutex_
  std::atomic<std::uint64_t> taken_{0};  // written under the mutex
};

}  // namespace fastdist::table
