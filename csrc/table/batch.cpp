#include "table/batch.h"

#include <array>
#include <bit>

namespace fastdist::table {
namespace {

constexpr std::size_t kMaxStripes = 256;

std::vector<Item> sort(const Striping& striping, std::span<const Item> items) {
  std::array<std::size_t, kMaxStripes> places{};
  for (const Item& item : items) ++places[striping.stripe(item.key)];
  std::size_t begin = 0;
  for (std::size_t& place : places) {
    const std::size_t count = place;
    place = begin;
    begin += count;
  }
  std::vector<Item> sorted(items.size());
  for (const Item& item : items) sorted[places[striping.stripe(item.key)]++] = item;
  return sorted;
}

}  // namespace

std::vector<Item> by_stripe(const Striping& striping, std::span<const std::uint64_t> ids) {
  std::vector<Item> items(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) items[i] = {striping.key(ids[i]), i};
  return sort(striping, items);
}

DistinctIds::DistinctIds(const Striping& striping, std::span<const std::uint64_t> ids) {
  // A hash table of positions + 1, at most half full.
  const std::size_t capacity = std::bit_ceil(2 * ids.size() + 2);
  const int shift = 64 - std::countr_zero(capacity);
  std::vector<std::uint32_t> seen(capacity);
  std::vector<Item> distinct;
  distinct.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint64_t key = striping.key(ids[i]);
    std::size_t at = (key * 0x9E3779B97F4A7C15U) >> shift;
    while (seen[at] != 0 && distinct[seen[at] - 1].key != key) at = (at + 1) & (capacity - 1);
    if (seen[at] == 0) {
      distinct.push_back({key, i});
      seen[at] = static_cast<std::uint32_t>(distinct.size());
    } else {
      chain(distinct[seen[at] - 1].position, i, ids.size());
    }
  }
  items_ = sort(striping, distinct);
}

void DistinctIds::chain(std::size_t first, std::size_t position, std::size_t count) {
  if (next_.empty()) {
    next_.assign(count, kNone);
    last_.assign(count, kNone);
  }
  const std::size_t last = last_[first] == kNone ? first : last_[first];
  next_[last] = position;
  last_[first] = position;
}

}  // namespace fastdist::table
