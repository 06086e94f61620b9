// Reads the rows of a table piece by piece while the table is in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "table/row_table.h"

namespace fastdist::table {

// Every row that is in the table from beginning to end is read exactly once, atomically, at some
// moment in between. Rows that are added or removed meanwhile may or may not be read. The table is
// locked only while a few rows are copied, or the ids of a part are listed. Thread-safe.
class RowSnapshot {
 public:
  explicit RowSnapshot(std::shared_ptr<RowTable> table) : table_(std::move(table)) {}

  // Fills the beginnings of the arrays with up to ids.size() rows and returns their number; 0 at
  // the end.
  std::size_t next(std::span<std::uint64_t> ids, std::span<float> values, std::span<float> slots);

  [[nodiscard]] const RowTable& table() const noexcept { return *table_; }

 private:
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();  // guards the position
  std::shared_ptr<RowTable> table_;
  std::size_t part_ = 0;               // the next part
  std::vector<std::uint64_t> listed_;  // remaining ids of the previous part
};

}  // namespace fastdist::table
