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
  // Of a hashed key the high bits: the low ones are the place in the stripe's index.
  [[nodiscard]] std::size_t stripe(std::uint64_t key) const noexcept {
    return (hashed ? key >> 48 : key) & (count - 1);
  }
};

// An id, and where it stands in the caller's arrays.
struct Item {
  std::uint64_t key;
  std::size_t position;
};

// Every id, by stripe; ids of one stripe stay in the order in which they came.
[[nodiscard]] std::vector<Item> by_stripe(const Striping& striping,
                                          std::span<const std::uint64_t> ids);

// Ids of which some may be equal: the first of each by stripe, and the others chained to it.
class DistinctIds {
 public:
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

  DistinctIds(const Striping& striping, std::span<const std::uint64_t> ids);

  [[nodiscard]] std::span<const Item> items() const noexcept { return items_; }
  // The next position with the same id, in the order in which they came, or kNone.
  [[nodiscard]] std::size_t next(std::size_t position) const noexcept {
    return next_.empty() ? kNone : next_[position];
  }

 private:
  void chain(std::size_t first, std::size_t position, std::size_t count);

  std::vector<Item> items_;
  std::vector<std::size_t> next_;  // empty where all ids differ
  std::vector<std::size_t> last_;  // of the chain that begins at a position
};

}  // namespace fastdist::table
