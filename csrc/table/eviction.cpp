// Removal of rows from a hashed table, by age and by number of rows.

#include <algorithm>
#include <array>
#include <cstring>

#include "table/row_table.h"

namespace fastdist::table {
namespace {

// Returns the number of steps since a row was touched. Steps wrap around, and the row may have been
// touched by a step later than `step`.
std::uint32_t age_of(const RowIndex::Entry& entry, std::uint32_t step) {
  return static_cast<std::uint32_t>(
      std::max<std::int32_t>(0, static_cast<std::int32_t>(step - entry.stamp)));
}

struct Oldest {
  std::uint32_t age;   // all older rows are included,
  std::size_t at_age;  // and this many rows of this age
};

// Finds the `count` oldest rows by radix selection from the highest digit, without allocating.
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
    while (ages[digit] < found.at_age) found.at_age -= ages[digit--];
    found.age |= digit << shift;
  }
  return found;
}

}  // namespace

bool RowTable::is_expired(const RowIndex::Entry& entry, std::uint32_t step) const noexcept {
  return options_.max_age && age_of(entry, step) > *options_.max_age;
}

void RowTable::remove_if(Stripe& stripe, auto&& is_unwanted) {
  stripe.index.erase_if([&](const RowIndex::Entry& entry) {
    if (!is_unwanted(entry)) return false;
    std::memcpy(arena_.row(entry.row), &stripe.free_row, sizeof(RowNumber));
    stripe.free_row = entry.row;
    return true;
  });
}

// Removes a sixteenth more rows than necessary, so that the search for the oldest rows is rare.
void RowTable::enforce_row_limit(Stripe& stripe, std::uint32_t step) noexcept {
  const std::size_t share = *options_.max_rows / striping_.count;
  if (stripe.index.size() <= share) return;
  Oldest oldest = find_oldest(stripe.index, step, stripe.index.size() - (share - share / 16));
  remove_if(stripe, [&](const RowIndex::Entry& entry) {
    const std::uint32_t age = age_of(entry, step);
    if (age != oldest.age || oldest.at_age == 0) return age > oldest.age;
    --oldest.at_age;
    return true;
  });
}

// Sweeps all stripes once per max_age pushes, so expired rows stay in memory at most twice the age
// limit.
void RowTable::sweep(std::uint64_t step) {
  const std::uint64_t pushes = *options_.max_age;
  const std::uint64_t begin = (step - 1) % pushes * striping_.count / pushes;
  const std::uint64_t end = ((step - 1) % pushes + 1) * striping_.count / pushes;
  for (std::uint64_t s = begin; s < end; ++s) {
    const std::lock_guard lock(stripes_[s].mutex);
    remove_if(stripes_[s], [&](const RowIndex::Entry& entry) {
      return is_expired(entry, static_cast<std::uint32_t>(step));
    });
  }
}

void RowTable::clear() {
  if (!striping_.hashed) return written_.clear();
  for (std::size_t s = 0; s < striping_.count; ++s) {
    const std::lock_guard lock(stripes_[s].mutex);
    remove_if(stripes_[s], [](const RowIndex::Entry&) { return true; });
  }
}

std::vector<std::uint64_t> RowTable::ids_of_part(std::size_t number) const {
  std::vector<std::uint64_t> ids;
  if (!striping_.hashed) {
    const std::uint64_t end = *options_.rows * (number + 1) / parts();
    for (std::uint64_t id = *options_.rows * number / parts(); id < end; ++id) {
      if (written_.contains(id)) ids.push_back(id);
    }
    return ids;
  }
  const auto now = static_cast<std::uint32_t>(step());
  const std::lock_guard lock(stripes_[number].mutex);
  const RowIndex& index = stripes_[number].index;
  ids.reserve(index.size());
  index.for_each([&](const RowIndex::Entry& entry) {
    if (!is_expired(entry, now)) ids.push_back(striping_.id(entry.key));
  });
  return ids;
}

}  // namespace fastdist::table
