// How rows leave a hashed table: erased, over the age limit, or over the limit of their number.

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/error.h"
#include "table/row_table.h"

namespace fastdist::table {
namespace {

// Steps since a row was touched. Steps wrap around; a row may be touched by a later step than the
// one that asks.
std::uint32_t age_of(const RowIndex::Entry& entry, std::uint32_t step) {
  return static_cast<std::uint32_t>(
      std::max<std::int32_t>(0, static_cast<std::int32_t>(step - entry.stamp)));
}

struct Oldest {
  std::uint32_t age;     // every older row is among them,
  std::size_t of_equal;  // and so many of this age
};

// The `count` oldest rows, found digit by digit from the highest, without any memory.
Oldest find_oldest(const RowIndex& index, std::uint32_t step, std::size_t count) {
  Oldest found{0, count};
  for (int shift = 24; shift >= 0; shift -= 8) {
    const std::uint32_t higher = shift == 24 ? 0 : ~std::uint32_t{0} << (shift + 8);
    std::array<std::size_t, 256> ages{};
    index.for_each([&](const RowIndex::Entry& entry) {
      const std::uint32_t age = age_of(entry, step);
      if ((age & higher) == found.age) ++ages[age >> shift & 255];
    });
    std::uint32_t digit = 255;
    while (ages[digit] < found.of_equal) found.of_equal -= ages[digit--];
    found.age |= digit << shift;
  }
  return found;
}

}  // namespace

bool RowTable::is_expired(const RowIndex::Entry& entry, std::uint32_t step) const noexcept {
  return options_.max_age && age_of(entry, step) > *options_.max_age;
}

void RowTable::free_row(Stripe& stripe, const RowIndex::Entry& entry) noexcept {
  std::memcpy(arena_.row(entry.number()), &stripe.free_row, sizeof(RowNumber));
  stripe.free_row = entry.number();
}

// Some more rows than need be go at once, so that looking for the oldest ones is seldom.
void RowTable::enforce_row_limit(Stripe& stripe, std::uint32_t step) noexcept {
  const std::size_t share = *options_.max_rows / striping_.count;
  if (stripe.index.size() <= share) return;
  Oldest oldest = find_oldest(stripe.index, step, stripe.index.size() - (share - share / 16));
  stripe.index.erase_if([&](RowIndex::Entry& entry) {
    const std::uint32_t age = age_of(entry, step);
    const bool goes = age > oldest.age || (age == oldest.age && oldest.of_equal > 0);
    if (!goes) return false;
    if (age == oldest.age) --oldest.of_equal;
    free_row(stripe, entry);
    return true;
  });
}

std::size_t RowTable::erase_expired(Stripe& stripe, std::uint32_t step) {
  const std::size_t before = stripe.index.size();
  stripe.index.erase_if([&](RowIndex::Entry& entry) {
    if (!is_expired(entry, step)) return false;
    free_row(stripe, entry);
    return true;
  });
  return before - stripe.index.size();
}

// All stripes once in as many pushes as rows may be old: expired rows stay in memory at most twice
// as long as they may.
void RowTable::sweep(std::uint64_t step) {
  const std::uint64_t pushes = *options_.max_age;
  const std::uint64_t begin = (step - 1) % pushes * striping_.count / pushes;
  const std::uint64_t end = ((step - 1) % pushes + 1) * striping_.count / pushes;
  for (std::uint64_t s = begin; s < end; ++s) {
    const std::lock_guard lock(stripes_[s].mutex);
    erase_expired(stripes_[s], static_cast<std::uint32_t>(step));
  }
}

std::size_t RowTable::evict() {
  std::size_t evicted = 0;
  for (std::size_t s = 0; options_.max_age && s < striping_.count; ++s) {
    const std::lock_guard lock(stripes_[s].mutex);
    evicted += erase_expired(stripes_[s], static_cast<std::uint32_t>(step()));
  }
  return evicted;
}

std::size_t RowTable::erase(std::span<const std::uint64_t> ids) {
  if (!striping_.hashed) {
    throw Error(ErrorCode::kValue, "the rows of a fixed table cannot be erased");
  }
  std::size_t erased = 0;
  for (const Item& item : by_stripe(striping_, ids)) {
    Stripe& stripe = stripes_[striping_.stripe(item.key)];
    const std::lock_guard lock(stripe.mutex);
    RowIndex::Entry* entry = stripe.index.find(item.key);
    if (entry == nullptr) continue;
    if (is_there(*entry, static_cast<std::uint32_t>(step()))) ++erased;
    free_row(stripe, *entry);
    stripe.index.erase(*entry);
  }
  return erased;
}

std::vector<std::uint64_t> RowTable::ids_of_part(std::size_t number) const {
  std::vector<std::uint64_t> ids;
  if (!striping_.hashed) {
    const std::uint64_t end = *options_.rows * (number + 1) / parts();
    for (std::uint64_t id = *options_.rows * number / parts(); id < end; ++id) ids.push_back(id);
    return ids;
  }
  const auto now = static_cast<std::uint32_t>(step());
  const std::lock_guard lock(stripes_[number].mutex);
  const RowIndex& index = stripes_[number].index;
  ids.reserve(index.size());
  index.for_each([&](const RowIndex::Entry& entry) {
    if (is_there(entry, now)) ids.push_back(striping_.id(entry.key));
  });
  return ids;
}

}  // namespace fastdist::table
