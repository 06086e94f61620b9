// The ids of one call, put in the order in which a table works on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "table/mixing.h"

namespace fastdist::table {

// How ids are spread over stripes, each with a lock of its own.
struct Striping {
  bool hashed;
  std::size_t count;  // a power of two

  // What stands for an id inside of a table; a fixed table counts on it being the id.
  [[nodiscard]] std::uint64_t key(std::uint64_t id) const noexcept {
    return hashed ? key_of(id) : id;
  }
  [[nodiscard]] std::uint64_t id(std::uint64_t key) const noexcept {
    return hashed ? id_of(key) : key;
  }
  // By the high bits, since the low ones are the place in the stripe's index. Ids of a fixed table
  // are stirred first: rows that are worked on one after another should not differ by a power of
  // two, or they meet in the same sets of the caches and the same banks of memory.
  [[nodiscard]] std::size_t stripe(std::uint64_t key) const noexcept {
    return (hashed ? key : key * 0x9E3779B97F4A7C15U) >> 48 & (count - 1);
  }
};

// An id, and where it stands in the caller's arrays.
struct Item {
  std::uint64_t key;
  std::size_t position;
};

// Every id, by stripe; ids of one stripe stay in the order in which they came. The items are in
// memory that the thread keeps for its next call of this or of DistinctIds: getting fresh memory
// from the kernel would take a third of the time of a lookup.
[[nodiscard]] std::span<const Item> by_stripe(const Striping& striping,
                                              std::span<const std::uint64_t> ids);

// Ids of which some may be equal: the first of each by stripe, and the others chained to it.
class DistinctIds {
 public:
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

  DistinctIds(const Striping& striping, std::span<const std::uint64_t> ids);

  // In the thread's memory, as above.
  [[nodiscard]] std::span<const Item> items() const noexcept { return items_; }
  // The next position with the same id, in the order in which they came, or kNone.
  [[nodiscard]] std::size_t next(std::size_t position) const noexcept {
    return next_.empty() ? kNone : next_[position];
  }

 private:
  void chain(std::size_t first, std::size_t position, std::size_t count);

  std::span<const Item> items_;
  std::vector<std::size_t> next_;  // empty where all ids differ
  std::vector<std::size_t> last_;  // of the chain that begins at a position
};

}  // namespace fastdist::table
