#include "table/batch.h"

#include <array>
#include <bit>
#include <numeric>
#include <utility>

namespace fastdist::table {
namespace {

constexpr std::size_t kMaxStripes = 128;

// Memory that a thread reuses from call to call, except after unusually large calls.
class Workspace {
 public:
  // Makes room for `ids` items.
  void prepare(std::size_t ids) {
    if (ids <= kKeptIds && unsorted.size() > kKeptIds) *this = {};
    if (unsorted.size() >= ids) return;
    sorted.resize(ids);
    unsorted.resize(ids);  // last, since its size is taken as the size of both
  }

  std::vector<Item> unsorted;
  std::vector<Item> sorted;
  std::vector<std::uint32_t> seen;

 private:
  static constexpr std::size_t kKeptIds = std::size_t{1} << 17;
};
thread_local Workspace workspace;

// Sorts the first `count` unsorted items by stripe.
std::span<const Item> sort(const Striping& striping, std::size_t count) {
  const std::span<const Item> items = std::span(workspace.unsorted).first(count);
  std::array<std::size_t, kMaxStripes> places{};
  for (const Item& item : items) ++places[striping.stripe(item.key)];
  std::size_t begin = 0;
  for (std::size_t& place : places) {
    const std::size_t here = place;
    place = begin;
    begin += here;
  }
  for (const Item& item : items) {
    workspace.sorted[places[striping.stripe(item.key)]++] = item;
  }
  return std::span(workspace.sorted).first(count);
}

}  // namespace

std::span<const Item> by_stripe(const Striping& striping, std::span<const std::uint64_t> ids) {
  workspace.prepare(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    workspace.unsorted[i] = {striping.key(ids[i]), i};
  }
  return sort(striping, ids.size());
}

DistinctIds::DistinctIds(const Striping& striping, std::span<const std::uint64_t> ids) {
  workspace.prepare(ids.size());
  std::vector<Item>& distinct = workspace.unsorted;
  // A hash table of indices into `distinct`, plus 1; at most half full.
  const std::size_t capacity = std::bit_ceil(2 * ids.size() + 2);
  const int shift = 64 - std::countr_zero(capacity);
  workspace.seen.assign(capacity, 0);
  std::vector<std::uint32_t>& seen = workspace.seen;
  std::vector<std::size_t> last;  // the last position of the chain that begins at a position
  std::uint32_t count = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint64_t key = striping.key(ids[i]);
    std::size_t at = (key * 0x9E3779B97F4A7C15U) >> shift;
    while (seen[at] != 0 && distinct[seen[at] - 1].key != key) at = (at + 1) & (capacity - 1);
    if (seen[at] == 0) {
      distinct[count++] = {key, i};
      seen[at] = count;
    } else {
      if (next_.empty()) {
        next_.assign(ids.size(), kNone);
        last.resize(ids.size());
        std::iota(last.begin(), last.end(), std::size_t{0});
      }
      next_[std::exchange(last[distinct[seen[at] - 1].position], i)] = i;
    }
  }
  items_ = sort(striping, count);
}

}  // namespace fastdist::table
