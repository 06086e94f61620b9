// Routing of a request's ids to servers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fastdist::table {

// The owners of ids: each owns a range of ids or, without ranges, an equal share of the hashes.
struct Owners {
  std::size_t count;
  std::vector<std::uint64_t> begins;  // the first id of each range, ascending from 0
  std::uint64_t end = 0;              // end of the last range

  [[nodiscard]] std::size_t owner_of(std::uint64_t id) const;
  // Returns an id relative to its owner's range.
  [[nodiscard]] std::uint64_t local(std::uint64_t id, std::size_t owner) const {
    return begins.empty() ? id : id - begins[owner];
  }
};

// Local ids, grouped by owner.
struct Routes {
  std::vector<std::uint64_t> ids;
  std::vector<std::size_t> counts;  // number of ids per owner
  // ids[i] was given at positions[i]. Empty if the ids are unchanged and in their given order.
  std::vector<std::int64_t> positions;
};

// Writes the owner of each id to `found`. Throws kIndex for an id outside all ranges.
void find_owners(const Owners& owners, std::span<const std::uint64_t> ids,
                 std::span<std::int64_t> found);
// Throws kIndex for an id outside all ranges.
[[nodiscard]] Routes route(const Owners& owners, std::span<const std::uint64_t> ids);

}  // namespace fastdist::table
