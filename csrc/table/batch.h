// The ids of one call, in the order in which a table processes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "table/mixing.h"

namespace fastdist::table {

// The mapping of ids to stripes; each stripe has its own lock.
struct Striping {
  bool hashed;
  std::size_t count;  // a power of two

  // Returns the key that represents an id inside a table. In a fixed table the key is the id.
  [[nodiscard]] std::uint64_t key(std::uint64_t id) const noexcept {
    return hashed ? key_of(id) : id;
  }
  [[nodiscard]] std::uint64_t id(std::uint64_t key) const noexcept {
    return hashed ? id_of(key) : key;
  }
  // Uses the high bits of the key, since the low bits are the position in the stripe's index. Keys
  // of a fixed table are mixed first: rows that are processed one after another should not differ
  // by a power of two, or they collide in the same cache sets and memory banks.
  [[nodiscard]] std::size_t stripe(std::uint64_t key) const noexcept {
    return (hashed ? key : key * 0x9E3779B97F4A7C15U) >> 48 & (count - 1);
  }
};

// An id's key, and its position in the caller's arrays.
struct Item {
  std::uint64_t key;
  std::size_t position;
};

// Returns all ids ordered by stripe; ids of one stripe keep their order. The items are in memory
// that the thread reuses in its next call of this function or of DistinctIds: fresh memory from the
// kernel would take a third of the time of a lookup.
[[nodiscard]] std::span<const Item> by_stripe(const Striping& striping,
                                              std::span<const std::uint64_t> ids);

// Ids with duplicates: the first of each id, ordered by stripe, with the duplicates chained to it.
class DistinctIds {
 public:
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

  DistinctIds(const Striping& striping, std::span<const std::uint64_t> ids);

  // The items are in the thread's reused memory, as in `by_stripe`.
  [[nodiscard]] std::span<const Item> items() const noexcept { return items_; }
  // Returns the next position with the same id, in the given order, or kNone.
  [[nodiscard]] std::size_t next(std::size_t position) const noexcept {
    return next_.empty() ? kNone : next_[position];
  }

 private:
  std::span<const Item> items_;
  std::vector<std::size_t> next_;  // empty if all ids differ
};

}  // namespace fastdist::table
