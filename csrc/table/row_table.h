// Rows on a parameter server: an embedding table with the optimizer's state of each row.
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
#include "table/format.h"
#include "table/initializer.h"
#include "table/kernels.h"
#include "table/memory.h"
#include "table/row_index.h"
#include "table/update_rule.h"

namespace fastdist::table {

struct RowTableOptions {
  std::size_t dim;
  UpdateRule rule;
  Initializer initializer;
  std::uint64_t seed = 0;
  // Added to ids for initial values: the first id, if this is a range of a larger table.
  std::uint64_t first_id = 0;
  Format storage = Format::kFloat32;
  // The number of rows of a fixed table, with ids from 0; nothing for a hashed table, with any ids.
  std::optional<std::uint64_t> rows = {};
  // The most that a fixed table's rows may take; nothing for any size.
  std::optional<std::size_t> memory_bytes = {};
  // Limits of a hashed table. Above max_rows, the least recently touched rows are evicted. Rows
  // that have not been touched for more than max_age pushes are evicted too.
  std::optional<std::uint64_t> max_rows = {};
  std::optional<std::uint32_t> max_age = {};
};

// All methods are thread-safe. Each row is read and changed atomically; the rows of one call are
// not.
//
// The first push or assign creates a row, in a fixed table too; before that, a pull returns its
// initial values. Every push is a step of the update rule, even a push without ids.
//
// Rows are spread over stripes, each with a lock. A call visits its rows stripe by stripe, holding
// the locks of the few stripes between the row it prefetches and the row it processes, so that many
// cache misses overlap. Locks are taken in ascending order, which excludes deadlock.
class RowTable {
 public:
  explicit RowTable(RowTableOptions options);

  void pull(std::span<const std::uint64_t> ids, std::span<float> values);
  // Makes one step, with a gradient per id. Gradients of equal ids are summed first. Throws
  // kMemory if there is no memory for new rows; the step is counted then, and some of the gradients
  // may be applied.
  void push(std::span<const std::uint64_t> ids, std::span<const float> gradients,
            std::optional<double> learning_rate);
  // Sets rows and, unless `slots` is empty, their slots; for equal ids, the last one wins. A new
  // row without given slots gets initial slots.
  void assign(std::span<const std::uint64_t> ids, std::span<const float> values,
              std::span<const float> slots);
  [[nodiscard]] std::size_t dim() const noexcept { return layout_.dim(); }
  [[nodiscard]] std::size_t slot_floats() const noexcept { return layout_.slot_floats(); }
  [[nodiscard]] const UpdateRule& rule() const noexcept { return options_.rule; }
  // Returns the number of rows that have been created.
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] std::size_t bytes() const;
  [[nodiscard]] std::uint64_t step() const noexcept {
    return step_.load(std::memory_order_relaxed);
  }
  // Must be called before a checkpoint's rows are assigned.
  void set_step(std::uint64_t step) noexcept { step_.store(step, std::memory_order_relaxed); }

  [[nodiscard]] std::uint64_t seed() const noexcept {
    return seed_.load(std::memory_order_relaxed);
  }
  // Changes the initial values of rows that have not been created.
  void set_seed(std::uint64_t seed) noexcept { seed_.store(seed, std::memory_order_relaxed); }
  // Removes all rows, before a checkpoint's rows are assigned: those that the checkpoint does not
  // have get their initial values again.
  void clear();

  // For checkpoints: `ids_of_part` lists the ids that a part of the table holds now. `read_present`
  // reads those of `ids` that are still present into the beginnings of the arrays, which are
  // `ids` too, and returns their number. Neither touches rows.
  [[nodiscard]] std::size_t parts() const noexcept { return striping_.count; }
  [[nodiscard]] std::vector<std::uint64_t> ids_of_part(std::size_t part) const;
  std::size_t read_present(std::span<std::uint64_t> ids, std::span<float> values,
                           std::span<float> slots);

 private:
  struct alignas(64) Stripe {
    std::mutex mutex;
    RowIndex index;
    RowNumber free_row = 0;  // the first of a chain of removed rows
    RowNumber next_row = 0;  // unused rows taken from the arena
    RowNumber end_row = 0;
  };
  enum class Access { kPeek, kTouch, kCreate };

  // Calls `call(item, row)` for each item under its stripe's lock; row is null if absent.
  template <Access kAccess, class Call>
  void visit(std::span<const Item> items, std::uint32_t step, Call&& call);
  template <Access kAccess>
  std::byte* find(Stripe& stripe, std::uint64_t key, std::uint32_t step);
  void prefetch_place(std::span<const Item> items, std::size_t i) const;
  RowNumber take_row(Stripe& stripe);
  // Erases the rows for which `is_unwanted(entry)`, and frees their memory.
  void remove_if(Stripe& stripe, auto&& is_unwanted);
  void fill_initial(std::span<float> values, std::uint64_t id) const {
    options_.initializer.fill(values, seed(), options_.first_id + id);
  }
  void write_initial(std::byte* row, std::uint64_t id);
  void read_initial(std::span<float> values, std::uint64_t id) const;

  [[nodiscard]] bool has_limits() const noexcept { return options_.max_rows || options_.max_age; }
  [[nodiscard]] bool is_expired(const RowIndex::Entry& entry, std::uint32_t step) const noexcept;
  // Removes expired rows from some stripes, during a push.
  void sweep(std::uint64_t step);
  // Called after a call has visited a stripe, under its lock.
  void enforce_row_limit(Stripe& stripe, std::uint32_t step) noexcept;

  void check_ids(std::span<const std::uint64_t> ids) const;

  RowTableOptions options_;
  RowLayout layout_;
  Striping striping_;
  UpdateFunction update_;
  std::vector<float> initial_slots_;
  std::atomic<std::uint64_t> step_{0};
  std::atomic<std::uint64_t> seed_;
  RowArena arena_;
  WrittenRows written_;  // of a fixed table
  std::unique_ptr<Stripe[]> stripes_;
};

}  // namespace fastdist::table
