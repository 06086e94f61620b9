// Which rows a table has: of a hashed table an index per stripe, of a fixed table one bit per row.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "table/memory.h"

namespace fastdist::table {

// The index of one stripe: a hash table from keys to row numbers.
//
// Open addressing with linear probing: a lookup touches one cache line, rarely two. Keys look
// random already, so their low bits are the position. Erasing an entry moves later entries into its
// place, so there are no tombstones.
//
// All methods except prefetch() require the stripe's lock.
class RowIndex {
 public:
  struct Entry {
    std::uint64_t key;
    RowNumber row;        // 0 for an empty place
    std::uint32_t stamp;  // the step that last touched the row, if the table has limits
  };

  [[nodiscard]] Entry* find(std::uint64_t key) const noexcept {
    if (size_ == 0) return nullptr;
    for (std::size_t at = key & mask();; at = (at + 1) & mask()) {
      Entry& entry = entries()[at];
      if (entry.row == 0) return nullptr;
      if (entry.key == key) return &entry;
    }
  }
  // Makes room for one more entry. Throws kMemory, with nothing changed.
  void reserve_one();
  // The key must be absent, and room must be reserved.
  Entry& insert(std::uint64_t key, RowNumber row, std::uint32_t stamp) noexcept;
  void erase(Entry& entry) noexcept;

  // Prefetches the cache line of a key's place. Any thread may call this without the lock: outdated
  // pointers cost time but are harmless.
  void prefetch(std::uint64_t key) const noexcept {
    const std::size_t offset = (key & mask_.load(std::memory_order_relaxed)) * sizeof(Entry);
    __builtin_prefetch(reinterpret_cast<const void*>(
        reinterpret_cast<std::uintptr_t>(entries_.load(std::memory_order_relaxed)) + offset));
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return memory_ ? (mask() + 1) * sizeof(Entry) : 0;
  }

  void for_each(auto&& visit) const {
    for (std::size_t at = 0; size_ != 0 && at <= mask(); ++at) {
      if (entries()[at].row != 0) visit(entries()[at]);
    }
  }
  // Erases entries for which `is_unwanted(entry)`. The place of an erased entry is checked again;
  // an entry that moved there from the beginning of the table is simply checked twice.
  void erase_if(auto&& is_unwanted) {
    for (std::size_t at = 0; size_ != 0 && at <= mask();) {
      Entry& entry = entries()[at];
      if (entry.row != 0 && is_unwanted(entry)) {
        erase(entry);
      } else {
        ++at;
      }
    }
  }

 private:
  [[nodiscard]] Entry* entries() const noexcept { return entries_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::size_t mask() const noexcept { return mask_.load(std::memory_order_relaxed); }

  Memory memory_;
  // Atomic because of prefetch(). All other accesses hold the lock, so relaxed order suffices.
  std::atomic<Entry*> entries_{nullptr};
  std::atomic<std::size_t> mask_{0};
  std::size_t size_ = 0;
};

// Records which rows of a fixed table were written, one bit per row. Others have initial values.
//
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
