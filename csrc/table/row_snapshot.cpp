#include "table/row_snapshot.h"

#include <algorithm>
#include <thread>

namespace fastdist::table {
namespace {

// This many rows are copied in a few tens of microseconds.
constexpr std::size_t kPieceRows = 256;

}  // namespace

std::size_t RowSnapshot::next(std::span<std::uint64_t> ids, std::span<float> values,
                              std::span<float> slots) {
  const std::lock_guard lock(*mutex_);
  std::size_t rows = 0;
  while (rows < ids.size()) {
    if (listed_.empty()) {
      if (part_ == table_->parts()) break;
      listed_ = table_->ids_of_part(part_++);
      continue;
    }
    const std::size_t count = std::min({kPieceRows, listed_.size(), ids.size() - rows});
    const std::span piece = std::span(listed_).last(count);
    rows += table_->read_present(piece, ids.subspan(rows), values.subspan(rows * table_->dim()),
                                 slots.subspan(rows * table_->slot_floats()));
    listed_.resize(listed_.size() - count);
    std::this_thread::yield();  // mutexes are not fair; let other threads lock the stripes
  }
  return rows;
}

}  // namespace fastdist::table
