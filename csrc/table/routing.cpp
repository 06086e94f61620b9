#include "table/routing.h"

#include <algorithm>

#include "core/error.h"
#include "table/mixing.h"

namespace fastdist::table {
namespace {

void check_ids(const Owners& owners, std::span<const std::uint64_t> ids) {
  if (owners.begins.empty()) return;
  for (const std::uint64_t id : ids) {
    if (id < owners.end) continue;
    refuse(ErrorCode::kIndex, "row ", static_cast<std::int64_t>(id), " of a table that has ",
           owners.end, " rows");
  }
}

}  // namespace

std::size_t Owners::owner_of(std::uint64_t id) const {
  // A change of this formula moves rows to other servers.
  if (begins.empty()) return (mix(id) >> 32) * count >> 32;
  return static_cast<std::size_t>(std::ranges::upper_bound(begins, id) - begins.begin()) - 1;
}

void find_owners(const Owners& owners, std::span<const std::uint64_t> ids,
                 std::span<std::int64_t> found) {
  check_ids(owners, ids);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    found[i] = static_cast<std::int64_t>(owners.owner_of(ids[i]));
  }
}

Routes route(const Owners& owners, std::span<const std::uint64_t> ids) {
  check_ids(owners, ids);
  Routes routes;
  routes.counts.assign(owners.count, 0);
  if (owners.count == 1) {
    routes.ids.assign(ids.begin(), ids.end());
    routes.counts[0] = ids.size();
    return routes;
  }
  std::vector<std::uint32_t> owner(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    owner[i] = static_cast<std::uint32_t>(owners.owner_of(ids[i]));
    ++routes.counts[owner[i]];
  }
  std::vector<std::size_t> next(owners.count);
  for (std::size_t o = 1; o < owners.count; ++o) next[o] = next[o - 1] + routes.counts[o - 1];
  routes.ids.resize(ids.size());
  routes.positions.resize(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::size_t at = next[owner[i]]++;
    routes.ids[at] = owners.local(ids[i], owner[i]);
    routes.positions[at] = static_cast<std::int64_t>(i);
  }
  return routes;
}

}  // namespace fastdist::table
