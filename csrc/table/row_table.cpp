#include "table/row_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "core/noncopyable.h"

namespace fastdist::table {
namespace {

constexpr std::size_t kStripes = 128;
// The least share of max_rows per stripe, since the rows are unevenly distributed among smaller
// shares.
constexpr std::size_t kLeastShare = 1024;
constexpr std::size_t kMaxDim = std::size_t{1} << 24;
constexpr std::size_t kMaxIds = std::size_t{1} << 31;

// How many rows are prefetched ahead of the current row, and how many index places ahead of those
// rows.
constexpr std::size_t kRowsAhead = 16;
constexpr std::size_t kPlacesAhead = 16;
constexpr std::size_t kRowsRead = 256;  // for checkpoints, in a few tens of microseconds
// The processor itself prefetches the rest of longer rows.
constexpr std::size_t kPrefetchedBytes = 1024;

// Bytes of rows that a large stripe takes from the arena at a time.
constexpr std::size_t kRunBytes = 16 << 10;

// A window [visited, locked) of items ordered by stripe; the locks of the items' stripes are held.
template <class Stripe>
class LockWindow : NonCopyable {
 public:
  LockWindow(const Striping& striping, std::span<const Item> items, Stripe* stripes)
      : striping_(striping), items_(items), stripes_(stripes) {}
  ~LockWindow() {
    while (visited_ < locked_) leave([](Stripe&) {});
  }

  // Locks the stripe of the next item, unless the previous item has locked it.
  Stripe& enter() {
    Stripe& next = stripe(locked_);
    if (locked_ == visited_ || &stripe(locked_ - 1) != &next) next.mutex.lock();
    ++locked_;
    return next;
  }
  // Leaves the oldest item of the window. Calls `last_call(stripe)` before a lock is released.
  void leave(auto&& last_call) {
    Stripe& done = stripe(visited_++);
    if (visited_ < locked_ && &stripe(visited_) == &done) return;
    last_call(done);
    done.mutex.unlock();
  }

 private:
  Stripe& stripe(std::size_t i) const { return stripes_[striping_.stripe(items_[i].key)]; }

  const Striping striping_;
  std::span<const Item> items_;
  Stripe* stripes_;
  std::size_t visited_ = 0;
  std::size_t locked_ = 0;
};

Striping striping_of(const RowTableOptions& options) {
  std::size_t count = kStripes;
  if (options.max_rows) {
    count = std::bit_floor(std::clamp<std::size_t>(*options.max_rows / kLeastShare, 1, kStripes));
  }
  return {!options.rows, count};
}

void check_count(const char* argument, std::size_t ids, std::size_t width, std::size_t got) {
  if (got == ids * width) return;
  refuse(ErrorCode::kValue, argument, " must hold ", ids, " × ", width, " elements, got ", got);
}

void check_options(const RowTableOptions& options) {
  if (options.dim == 0 || options.dim > kMaxDim) {
    refuse(ErrorCode::kValue, "dim must be from 1 to ", kMaxDim, ", got ", options.dim);
  }
  if (options.rows && (options.max_rows || options.max_age)) {
    refuse(ErrorCode::kValue,
           "a table with fixed rows evicts none: max_rows and max_age are for hashed tables");
  }
  if (options.rows > kMaxRows) {
    refuse(ErrorCode::kValue, "a table holds at most 2^31 rows, got ", *options.rows);
  }
  if (options.max_rows == 0) refuse(ErrorCode::kValue, "max_rows must be 1 or more, got 0");
  if (options.max_age && (*options.max_age == 0 || *options.max_age > INT32_MAX)) {
    refuse(ErrorCode::kValue, "max_age must be from 1 to 2^31 - 1 pushes, got ", *options.max_age);
  }
}

}  // namespace

RowTable::RowTable(RowTableOptions options)
    : options_((check_options(options), std::move(options))),
      layout_(options_.dim, options_.storage, options_.rule),
      striping_(striping_of(options_)),
      update_(kernels().updates[options_.rule.index()]),
      seed_(options_.seed),
      arena_(layout_.stride()),
      written_(options_.rows.value_or(0)),
      stripes_(std::make_unique<Stripe[]>(striping_.count)) {
  for (const Slot& slot : options_.rule.slots()) {
    initial_slots_.insert(initial_slots_.end(), options_.rule.slot_width(dim()), slot.initial);
  }
  if (striping_.hashed) {
    arena_.take(1);  // row 0 marks empty places in the index
    return;
  }
  const std::uint64_t rows = *options_.rows;
  const std::size_t bytes = rows * layout_.stride();
  if (options_.memory_bytes && bytes > *options_.memory_bytes) {
    refuse(ErrorCode::kMemory, "out of memory: a table's rows need ", bytes,
           " bytes, and this process may use ", *options_.memory_bytes);
  }
  arena_.take(static_cast<std::uint32_t>(rows));
}

template <RowTable::Access kAccess, class Call>
void RowTable::visit(std::span<const Item> items, std::uint32_t step, Call&& call) {
  constexpr bool kWrites = kAccess == Access::kCreate;
  const std::size_t bytes =
      std::min(kPrefetchedBytes, kWrites ? layout_.stride() : layout_.value_bytes());
  std::array<std::byte*, kRowsAhead> rows;
  LockWindow<Stripe> window(striping_, items, stripes_.get());
  std::size_t found = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    for (; found < std::min(i + kRowsAhead, items.size()); ++found) {
      prefetch_place(items, found + kPlacesAhead);
      std::byte* row = find<kAccess>(window.enter(), items[found].key, step);
      rows[found % kRowsAhead] = row;
      if (row != nullptr) {
        for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, kWrites);
      }
    }
    call(items[i], rows[i % kRowsAhead]);
    window.leave([&](Stripe& stripe) {
      if (kAccess == Access::kCreate && options_.max_rows) enforce_row_limit(stripe, step);
    });
  }
}

template <RowTable::Access kAccess>
std::byte* RowTable::find(Stripe& stripe, std::uint64_t key, std::uint32_t step) {
  if (!striping_.hashed) {
    std::byte* row = arena_.row(static_cast<RowNumber>(key));
    if (written_.contains(key)) return row;
    if (kAccess != Access::kCreate) return nullptr;
    write_initial(row, key);
    written_.insert(key);
    return row;
  }
  RowIndex::Entry* entry = stripe.index.find(key);
  if (entry == nullptr) {
    if (kAccess != Access::kCreate) return nullptr;
    stripe.index.reserve_one();
    const RowNumber number = take_row(stripe);
    write_initial(arena_.row(number), striping_.id(key));
    entry = &stripe.index.insert(key, number, step);
  } else if (is_expired(*entry, step)) {
    if (kAccess != Access::kCreate) return nullptr;
    write_initial(arena_.row(entry->row), striping_.id(key));
  }
  // Concurrent calls may have steps in any order.
  const bool is_later = has_limits() && static_cast<std::int32_t>(step - entry->stamp) > 0;
  if (kAccess != Access::kPeek && is_later) entry->stamp = step;
  return arena_.row(entry->row);
}

RowNumber RowTable::take_row(Stripe& stripe) {
  if (stripe.free_row != 0) {
    const RowNumber row = stripe.free_row;
    std::memcpy(&stripe.free_row, arena_.row(row), sizeof(RowNumber));
    return row;
  }
  if (stripe.next_row == stripe.end_row) {
    const std::size_t run = std::min(kRunBytes / layout_.stride(), stripe.index.size() / 8);
    const auto count = static_cast<std::uint32_t>(std::max<std::size_t>(run, 1));
    stripe.next_row = arena_.take(count);
    stripe.end_row = stripe.next_row + count;
  }
  return stripe.next_row++;
}

void RowTable::prefetch_place(std::span<const Item> items, std::size_t i) const {
  if (i >= items.size()) return;
  const std::uint64_t key = items[i].key;
  if (!striping_.hashed) return written_.prefetch(key);
  stripes_[striping_.stripe(key)].index.prefetch(key);
}

void RowTable::write_initial(std::byte* row, std::uint64_t id) {
  if (options_.storage == Format::kFloat32) {
    fill_initial({reinterpret_cast<float*>(row), layout_.dim()}, id);
  } else {
    std::vector<float> values(layout_.dim());
    fill_initial(values, id);
    layout_.write(row, values.data());
  }
  std::ranges::copy(initial_slots_, layout_.slots(row));
}

void RowTable::read_initial(std::span<float> values, std::uint64_t id) const {
  fill_initial(values, id);
  if (options_.storage == Format::kFloat32) return;
  std::vector<float> row(layout_.stride() / sizeof(float) + 1);
  layout_.write(reinterpret_cast<std::byte*>(row.data()), values.data());
  layout_.read(values.data(), reinterpret_cast<const std::byte*>(row.data()));
}

void RowTable::pull(std::span<const std::uint64_t> ids, std::span<float> values) {
  check_ids(ids);
  check_count("values", ids.size(), dim(), values.size());
  const std::span<const Item> items = by_stripe(striping_, ids);
  visit<Access::kTouch>(items, static_cast<std::uint32_t>(step()),
                        [&](const Item& item, const std::byte* row) {
                          const auto out = values.subspan(item.position * dim(), dim());
                          if (row == nullptr) return read_initial(out, striping_.id(item.key));
                          layout_.read(out.data(), row);
                        });
}

void RowTable::push(std::span<const std::uint64_t> ids, std::span<const float> gradients,
                    std::optional<double> learning_rate) {
  check_ids(ids);
  check_count("gradients", ids.size(), dim(), gradients.size());
  const double lr = options_.rule.learning_rate(learning_rate);
  const DistinctIds distinct(striping_, ids);
  std::vector<float> sum(dim());
  std::vector<float> scratch(dim());
  const std::uint64_t step = step_.fetch_add(1, std::memory_order_relaxed) + 1;
  const Coefficients c = options_.rule.coefficients(step, lr, Gradients::kRows);
  visit<Access::kCreate>(distinct.items(), static_cast<std::uint32_t>(step),
                         [&](const Item& item, std::byte* row) {
                           const float* gradient = gradients.data() + item.position * dim();
                           std::size_t next = distinct.next(item.position);
                           if (next != DistinctIds::kNone) {
                             std::copy_n(gradient, dim(), sum.data());
                             for (; next != DistinctIds::kNone; next = distinct.next(next)) {
                               kernels().add(sum.data(), gradients.data() + next * dim(), dim());
                             }
                             gradient = sum.data();
                           }
                           layout_.update(row, update_, c, gradient, scratch.data());
                         });
  if (options_.max_age) sweep(step);
}

void RowTable::assign(std::span<const std::uint64_t> ids, std::span<const float> values,
                      std::span<const float> slots) {
  check_ids(ids);
  check_count("values", ids.size(), dim(), values.size());
  if (!slots.empty()) check_count("slots", ids.size(), slot_floats(), slots.size());
  const std::span<const Item> items = by_stripe(striping_, ids);
  const auto now = static_cast<std::uint32_t>(step());
  visit<Access::kCreate>(items, now, [&](const Item& item, std::byte* row) {
    layout_.write(row, values.data() + item.position * dim());
    if (slots.empty()) return;
    std::copy_n(slots.data() + item.position * slot_floats(), slot_floats(), layout_.slots(row));
  });
}

std::size_t RowTable::read_present(std::span<std::uint64_t> ids, std::span<float> values,
                                   std::span<float> slots) {
  std::size_t count = 0;
  const auto read = [&](const Item& item, std::byte* row) {
    if (row == nullptr) return;
    ids[count] = striping_.id(item.key);
    layout_.read(values.data() + count * dim(), row);
    std::copy_n(layout_.slots(row), slot_floats(), slots.data() + count * slot_floats());
    ++count;
  };
  std::span<const Item> items = by_stripe(striping_, ids);
  while (!items.empty()) {
    const std::span<const Item> piece = items.first(std::min(kRowsRead, items.size()));
    visit<Access::kPeek>(piece, static_cast<std::uint32_t>(step()), read);
    items = items.subspan(piece.size());
    std::this_thread::yield();  // mutexes are not fair; let other threads lock the stripes
  }
  return count;
}

void RowTable::check_ids(std::span<const std::uint64_t> ids) const {
  if (ids.size() > kMaxIds) {
    refuse(ErrorCode::kValue, "one call takes at most 2^31 ids, got ", ids.size());
  }
  if (striping_.hashed) return;
  const std::uint64_t rows = *options_.rows;
  for (const std::uint64_t id : ids) {
    if (id < rows) continue;
    refuse(ErrorCode::kIndex, "id ", static_cast<std::int64_t>(id),
           " is out of range: the table has rows 0 to ", static_cast<std::int64_t>(rows) - 1);
  }
}

std::size_t RowTable::size() const {
  if (!striping_.hashed) return written_.count();
  std::size_t total = 0;
  for (std::size_t s = 0; s < striping_.count; ++s) {
    const std::lock_guard lock(stripes_[s].mutex);
    total += stripes_[s].index.size();
  }
  return total;
}

std::size_t RowTable::bytes() const {
  std::size_t total = striping_.count * sizeof(Stripe) + written_.bytes();
  total += striping_.hashed ? arena_.bytes() : size() * layout_.stride();
  for (std::size_t s = 0; s < striping_.count; ++s) {
    const std::lock_guard lock(stripes_[s].mutex);
    total += stripes_[s].index.bytes();
  }
  return total;
}

}  // namespace fastdist::table
