// Records which rows of a fixed table were written, one bit per row. Others have initial values.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "table/memory.h"

namespace fastdist::table {

// A row's bit is read and set under the lock of the row's stripe, which orders the accesses. Words
// are atomic because rows of different stripes share them, and relaxed because of the locks.
class WrittenRows {
 public:
  explicit WrittenRows(std::uint64_t rows)
      : words_((rows + 63) / 64),
        memory_(allocate(words_ * sizeof(std::uint64_t), Pages::kSmall, "a table's rows")) {}

  [[nodiscard]] bool contains(std::uint64_t row) const noexcept {
    return (word(row / 64).load(std::memory_order_relaxed) >> row % 64 & 1) != 0;
  }
  void insert(std::uint64_t row) noexcept {
    word(row / 64).fetch_or(std::uint64_t{1} << row % 64, std::memory_order_relaxed);
  }
  void prefetch(std::uint64_t row) const noexcept { __builtin_prefetch(data() + row / 64); }

  [[nodiscard]] std::size_t bytes() const noexcept { return words_ * sizeof(std::uint64_t); }
  // A row that is inserted meanwhile may or may not be counted, or removed.
  [[nodiscard]] std::size_t count() const noexcept {
    std::size_t total = 0;
    for (std::size_t i = 0; i < words_; ++i) {
      total += static_cast<std::size_t>(std::popcount(word(i).load(std::memory_order_relaxed)));
    }
    return total;
  }
  void clear() noexcept {
    for (std::size_t i = 0; i < words_; ++i) {
      // Only words with rows: writing would commit the pages of the others.
      if (word(i).load(std::memory_order_relaxed) != 0) {
        word(i).store(0, std::memory_order_relaxed);
      }
    }
  }

 private:
  [[nodiscard]] std::uint64_t* data() const noexcept {
    return reinterpret_cast<std::uint64_t*>(memory_.get());
  }
  [[nodiscard]] std::atomic_ref<std::uint64_t> word(std::size_t i) const noexcept {
    return std::atomic_ref<std::uint64_t>(data()[i]);
  }

  std::size_t words_;
  Memory memory_;
};

}  // namespace fastdist::table
