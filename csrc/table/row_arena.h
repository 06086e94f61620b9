// The memory of a table's rows. Rows are numbered and never move.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "table/memory.h"

namespace fastdist::table {

using RowNumber = std::uint32_t;

// Blocks of which each is as large as all before it, so that 32 pointers find any row. The pages of
// a block become real when its rows are used.
//
// take() locks; row() does not: whoever has a row's number got it after take() had returned it,
// through the lock of a stripe.
class RowArena {
 public:
  explicit RowArena(std::size_t stride);

  // The first of `count` rows that were never taken; their memory is zeroed. Throws kMemory.
  RowNumber take(std::uint32_t count);
  [[nodiscard]] std::byte* row(RowNumber number) const noexcept {
    const auto block = static_cast<unsigned>(std::bit_width(number >> first_bits_));
    return blocks_[block].get() + (number - first_row(block)) * stride_;
  }
  // Of the rows that were taken.
  [[nodiscard]] std::size_t bytes() const noexcept {
    return taken_.load(std::memory_order_relaxed) * stride_;
  }

 private:
  // Block 0 has 2^first_bits_ rows, as has block 1; then they double.
  [[nodiscard]] std::size_t first_row(unsigned block) const noexcept {
    return block == 0 ? 0 : std::size_t{1} << (first_bits_ + block - 1);
  }

  std::size_t stride_;
  unsigned first_bits_;
  std::array<Memory, 33> blocks_;
  std::mutex mutex_;
  std::atomic<std::uint64_t> taken_{0};  // written under the mutex
};

}  // namespace fastdist::table
