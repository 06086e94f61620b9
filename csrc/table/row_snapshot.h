// The rows of a table piece by piece, while it goes on being used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "table/row_table.h"

namespace fastdist::table {

// Every row that is in the table from the beginning to the end is read once, whole, as it is at
// some moment in between; rows that come or go meanwhile may be in it or not. The table is never
// locked for longer than it takes to copy a few rows or to list the ids of a part of it.
class RowSnapshot {
 public:
  explicit RowSnapshot(std::shared_ptr<RowTable> table) : table_(std::move(table)) {}

  // Reads into the beginnings of the arrays, up to as many rows as there is room for ids, and
  // returns how many; 0 at the end.
  std::size_t next(std::span<std::uint64_t> ids, std::span<float> values, std::span<float> slots);

  [[nodiscard]] const RowTable& table() const noexcept { return *table_; }

 private:
  std::shared_ptr<RowTable> table_;
  std::size_t part_ = 0;               // the next one
  std::vector<std::uint64_t> listed_;  // what is left of the one before
};

}  // namespace fastdist::table
