// The index of one stripe: a hash table from keys to row numbers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "table/memory.h"
#include "table/row_arena.h"

namespace fastdist::table {

// Open addressing with linear probing: a lookup touches one cache line, rarely two. Keys look
// random already, so their low bits are the position. Erasing an entry moves later entries into its
// place, so there are no tombstones.
//
// All methods except prefetch() require the stripe's lock.
class RowIndex {
 public:
  struct Entry {
    std::uint64_t key;
    RowNumber row;        // 0 for an empty place; kUnwritten is set if the row has memory but no
                          // values yet, and counts as absent
    std::uint32_t stamp;  // the step that last touched the row, if the table has limits

    [[nodiscard]] RowNumber number() const noexcept { return row & ~kUnwritten; }
    [[nodiscard]] bool is_written() const noexcept { return (row & kUnwritten) == 0; }
  };
  static constexpr RowNumber kUnwritten = RowNumber{1} << 31;

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

  template <class Visit>
  void for_each(Visit&& visit) const {
    for (std::size_t at = 0; size_ != 0 && at <= mask(); ++at) {
      if (entries()[at].row != 0) visit(entries()[at]);
    }
  }
  // Erases entries for which `is_unwanted(entry)`. The place of an erased entry is checked again;
  // an entry that moved there from the beginning of the table is simply checked twice.
  template <class Predicate>
  void erase_if(Predicate&& is_unwanted) {
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

}  // namespace fastdist::table
