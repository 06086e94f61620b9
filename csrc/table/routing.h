// Which server each id of a request goes to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fastdist::table {

// The owners of ids: of ranges, or, where there are none, of an equal part of all hashes each.
struct Owners {
  std::size_t count;
  std::vector<std::uint64_t> begins;  // the first id of each range, ascending from 0
  std::uint64_t end = 0;              // of the last range

  [[nodiscard]] std::size_t of(std::uint64_t id) const;
  // An id as its owner knows it.
  [[nodiscard]] std::uint64_t local(std::uint64_t id, std::size_t owner) const {
    return begins.empty() ? id : id - begins[owner];
  }
};

// Ids in the order of their owners, local ones.
struct Routes {
  std::vector<std::uint64_t> ids;
  std::vector<std::size_t> counts;  // of each owner
  // route(): ids[i] is the one given at places[i]. route_distinct(): the one given at i is
  // ids[places[i]]. Empty where the ids are those given, in their order.
  std::vector<std::int64_t> places;
};

// Throws kIndex for an id beyond all ranges.
[[nodiscard]] Routes route(const Owners& owners, std::span<const std::uint64_t> ids);
// Equal ids go once; unless there is one owner only and so few of them are equal that the copies
// this needs would take longer.
[[nodiscard]] Routes route_distinct(const Owners& owners, std::span<const std::uint64_t> ids);

}  // namespace fastdist::table
