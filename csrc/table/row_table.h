// Rows on a parameter server: an embedding table with the optimizer's state beside each row.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "table/batch.h"
#include "table/initializer.h"
#include "table/kernels.h"
#include "table/row_arena.h"
#include "table/row_index.h"
#include "table/row_layout.h"
#include "table/update_rule.h"

namespace fastdist::table {

struct RowTableOptions {
  std::size_t dim;
  UpdateRule rule;
  Initializer initializer;
  Storage storage = Storage::kFloat32;
  // How many rows a fixed table has, with ids from 0; nothing for a hashed table, with any ids.
  std::optional<std::uint64_t> rows = {};
  // Limits of a hashed table. Where there are more than max_rows, those go that were touched the
  // longest ago; and so do rows that more than max_age pushes have not touched.
  std::optional<std::uint64_t> max_rows = {};
  std::optional<std::uint32_t> max_age = {};
  Rounding rounding = Rounding::kNearest;
};

// Any number of threads may call anything at the same time. Each row is read and changed as a
// whole; different rows of one call are not.
//
// A row comes into being by its first push or assign; before, a pull gives what it will begin as.
// Every push is a step of the update rule, one of no ids too.
//
// Rows are spread over stripes, each with a lock. A call visits its rows stripe by stripe, holding
// the locks of the few stripes between the row it looks for and the row it works on: so many cache
// misses are under way at once. Locks are taken in ascending order, hence without deadlock.
class RowTable {
 public:
  explicit RowTable(RowTableOptions options);
  RowTable(const RowTable&) = delete;
  RowTable& operator=(const RowTable&) = delete;

  // `values` gets a row for each id.
  void pull(std::span<const std::uint64_t> ids, std::span<float> values);
  // One step, with a gradient for each id. Those of equal ids are added up first. When memory for
  // new rows cannot be had, no gradient has been applied.
  void push(std::span<const std::uint64_t> ids, std::span<const float> gradients,
            std::optional<double> learning_rate);
  // Sets rows and, unless `slots` is empty, their slots; of equal ids the last one counts. A row
  // that comes into being with no slots given gets initial ones.
  void assign(std::span<const std::uint64_t> ids, std::span<const float> values,
              std::span<const float> slots);
  // `slots` gets the slots of each id. Neither this nor contains() touches rows.
  void read_slots(std::span<const std::uint64_t> ids, std::span<float> slots);
  void contains(std::span<const std::uint64_t> ids, std::span<bool> found);

  // Of a hashed table. Returns how many rows there were.
  std::size_t erase(std::span<const std::uint64_t> ids);
  // Erases now all rows that are over an age limit, and returns how many. Pushes do so little by
  // little; either way nobody sees such rows any more.
  std::size_t evict();

  [[nodiscard]] std::size_t dim() const noexcept { return layout_.dim(); }
  [[nodiscard]] std::size_t slot_floats() const noexcept { return layout_.slot_floats(); }
  [[nodiscard]] const UpdateRule& rule() const noexcept { return options_.rule; }
  // Rows in memory.
  [[nodiscard]] std::size_t size() const;
  // Memory in use for rows and index.
  [[nodiscard]] std::size_t bytes() const;
  [[nodiscard]] std::uint64_t step() const noexcept {
    return step_.load(std::memory_order_relaxed);
  }
  // Before a checkpoint's rows are assigned.
  void set_step(std::uint64_t step) noexcept { step_.store(step, std::memory_order_relaxed); }

  // For snapshots: the ids that each part of the table holds now, and what is there of some ids;
  // their number is returned, and the arrays begin with them. Touches nothing.
  [[nodiscard]] std::size_t parts() const noexcept { return striping_.count; }
  [[nodiscard]] std::vector<std::uint64_t> ids_of_part(std::size_t part) const;
  std::size_t read_present(std::span<const std::uint64_t> ids, std::span<std::uint64_t> present,
                           std::span<float> values, std::span<float> slots);

 private:
  struct alignas(64) Stripe {
    std::mutex mutex;
    RowIndex index;
    RowNumber free_row = 0;  // the first of a chain of erased rows
    RowNumber next_row = 0;  // rows taken from the arena that were not used yet
    RowNumber end_row = 0;
  };
  enum class Access { kPeek, kTouch, kCreate };

  // Calls `call(item, row)` for each item under its stripe's lock; row is null where there is none.
  template <Access kAccess, class Call>
  void visit(std::span<const Item> items, std::uint32_t step, Call&& call);
  template <Access kAccess>
  std::byte* find(Stripe& stripe, std::uint64_t key, std::uint32_t step);
  // Gives every id a row's memory, so that a call that creates rows cannot fail half-way.
  void make_room(std::span<const Item> items, std::uint32_t step);
  void prefetch_place(std::span<const Item> items, std::size_t i) const;
  RowIndex::Entry& insert(Stripe& stripe, std::uint64_t key, std::uint32_t step);

  RowNumber take_row(Stripe& stripe);
  // Gives the row's memory back; the entry is still to be erased.
  void free_row(Stripe& stripe, const RowIndex::Entry& entry) noexcept;
  void write_initial(std::byte* row, std::uint64_t id);
  void read_initial(std::span<float> values, std::uint64_t id) const;

  [[nodiscard]] bool has_limits() const noexcept { return options_.max_rows || options_.max_age; }
  [[nodiscard]] bool is_there(const RowIndex::Entry& entry, std::uint32_t step) const noexcept {
    return entry.is_written() && !is_expired(entry, step);
  }
  [[nodiscard]] bool is_expired(const RowIndex::Entry& entry, std::uint32_t step) const noexcept;
  std::size_t erase_expired(Stripe& stripe, std::uint32_t step);
  // What a push does about rows over the age limit.
  void sweep(std::uint64_t step);
  // After a call has visited a stripe, under its lock.
  void enforce_row_limit(Stripe& stripe, std::uint32_t step) noexcept;

  void check_ids(std::span<const std::uint64_t> ids) const;

  RowTableOptions options_;
  RowLayout layout_;
  Striping striping_;
  UpdateFunction update_;
  std::vector<float> initial_slots_;
  std::atomic<std::uint64_t> step_{0};
  RowArena arena_;
  std::unique_ptr<Stripe[]> stripes_;
};

}  // namespace fastdist::table
