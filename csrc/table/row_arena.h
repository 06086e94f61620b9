// The memory of a table's rows. Rows are numbered and never move.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "table/memory.h"

namespace fastdist::table {

using RowNumber = std::uint32_t;
inline constexpr std::size_t kMaxRows = std::size_t{1} << 31;

// Blocks of equal size; the pages of a block become real when its rows are used.
//
// take() locks; row() does not: whoever has a row's number got it after take() had returned it,
// through the lock of a stripe. The array of blocks has room for all there can ever be, so that it
// stays where it is; of that, too, only what is used becomes real.
class RowArena {
 public:
  explicit RowArena(std::size_t stride);

  // The first of `count` rows that were never taken; their memory is zeroed. Throws kMemory.
  RowNumber take(std::uint32_t count);
  [[nodiscard]] std::byte* row(RowNumber number) const noexcept {
    return blocks()[number >> block_bits_] + (number & block_mask_) * stride_;
  }
  // Of the rows that were taken.
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
  std::vector<Memory> owned_;            // guarded by the mutex
  std::atomic<std::uint64_t> taken_{0};  // written under the mutex
};

}  // namespace fastdist::table
