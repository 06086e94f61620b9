#include "table/row_index.h"

#include <utility>

namespace fastdist::table {
namespace {

constexpr std::size_t kFirstCapacity = 16;

// Returns the first free place at or after the key's own place.
RowIndex::Entry& free_place(RowIndex::Entry* entries, std::size_t mask, std::uint64_t key) {
  std::size_t at = key & mask;
  while (entries[at].row != 0) at = (at + 1) & mask;
  return entries[at];
}

}  // namespace

void RowIndex::reserve_one() {
  const std::size_t capacity = memory_ ? mask() + 1 : 0;
  if ((size_ + 1) * 4 <= capacity * 3) return;
  const std::size_t grown = capacity == 0 ? kFirstCapacity : 2 * capacity;
  Memory memory = allocate(grown * sizeof(Entry), Pages::kHuge, "a table's index");
  auto* to = reinterpret_cast<Entry*>(memory.get());
  for_each([&](const Entry& entry) { free_place(to, grown - 1, entry.key) = entry; });
  entries_.store(to, std::memory_order_relaxed);
  mask_.store(grown - 1, std::memory_order_relaxed);
  memory_ = std::move(memory);
}

RowIndex::Entry& RowIndex::insert(std::uint64_t key, RowNumber row, std::uint32_t stamp) noexcept {
  Entry& entry = free_place(entries(), mask(), key);
  entry = {key, row, stamp};
  ++size_;
  return entry;
}

void RowIndex::erase(Entry& entry) noexcept {
  std::size_t hole = static_cast<std::size_t>(&entry - entries());
  for (std::size_t at = (hole + 1) & mask(); entries()[at].row != 0; at = (at + 1) & mask()) {
    // An entry may move into the hole unless its own place is behind the hole.
    const std::size_t from_home = (at - entries()[at].key) & mask();
    const std::size_t from_hole = (at - hole) & mask();
    if (from_home < from_hole) continue;
    entries()[hole] = entries()[at];
    hole = at;
  }
  entries()[hole] = {};
  --size_;
}

}  // namespace fastdist::table
