#include "table/dense_variable.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace fastdist::table {
namespace {

// Copies in pieces that memcpy copies with vector instructions. For larger sizes memcpy uses `rep
// movsb`, which falls to a few GB/s on Zen 3 and 4 if dst is just behind src modulo 4096, as a
// numpy array is.
void copy(float* dst, const float* src, std::size_t count) {
  constexpr std::size_t kPiece = 256;
  for (; count > kPiece; count -= kPiece, dst += kPiece, src += kPiece) {
    std::memcpy(dst, src, kPiece * sizeof(float));
  }
  if (count != 0) std::memcpy(dst, src, count * sizeof(float));  // empty spans may be null
}

void check_count(const char* argument, std::size_t expected, std::size_t got) {
  if (got == expected) return;
  refuse(ErrorCode::kValue, argument, " must hold ", expected, " elements, got ", got);
}

}  // namespace

DenseVariable::DenseVariable(std::span<const float> initial, UpdateRule rule)
    : rule_(std::move(rule)),
      size_(initial.size()),
      update_(kernels().updates[rule_.index()]),
      chunks_(size_ / kChunk + 1) {
  if (rule_.is_row_wise()) {
    refuse(ErrorCode::kValue, rule_.name(),
           " updates rows of tables, not dense variables: they take Adagrad");
  }
  values_ = allocate(size_ * sizeof(float), Pages::kHuge, "a variable");
  slots_ = allocate(slot_floats() * sizeof(float), Pages::kHuge, "a variable's slots");
  copy(element(0), initial.data(), size_);
  for (std::size_t i = 0; i < rule_.slots().size(); ++i) {
    std::fill_n(slot(i), size_, rule_.slots()[i].initial);
  }
}

void DenseVariable::for_each_chunk(std::size_t begin, std::size_t end, auto&& call) {
  do {
    const std::size_t number = begin / kChunk;
    const std::size_t count = std::min(end, (number + 1) * kChunk) - begin;
    const std::lock_guard lock(chunks_[number].mutex);
    call(chunks_[number], begin, count);
    begin += count;
  } while (begin < end);
}

void DenseVariable::check_range(const char* argument, std::size_t begin, std::size_t count) const {
  if (begin <= size_ && count <= size_ - begin) return;
  refuse(ErrorCode::kIndex, argument, " holds ", count, " elements from ", begin,
         " on, the variable has ", size_);
}

void DenseVariable::pull(std::size_t begin, std::span<float> values) {
  check_range("values", begin, values.size());
  for_each_chunk(begin, begin + values.size(), [&](Chunk&, std::size_t at, std::size_t count) {
    copy(values.data() + (at - begin), element(at), count);
  });
}

void DenseVariable::push(std::size_t begin, std::span<const float> gradient,
                         std::optional<double> learning_rate) {
  check_range("gradient", begin, gradient.size());
  if (begin % kChunk != 0) {
    refuse(ErrorCode::kValue, "a gradient begins at a multiple of ", kChunk, " elements, got ",
           begin);
  }
  const double lr = rule_.learning_rate(learning_rate);
  std::uint64_t step = 0;
  Coefficients c;
  for_each_chunk(begin, begin + gradient.size(),
                 [&](Chunk& chunk, std::size_t at, std::size_t count) {
                   if (++chunk.step != step) {
                     step = chunk.step;
                     c = rule_.coefficients(step, lr, Gradients::kDense);
                   }
                   std::array<float*, kMaxSlots> slots{};
                   for (std::size_t i = 0; i < rule_.slots().size(); ++i) slots[i] = slot(i) + at;
                   update_(c, element(at), gradient.data() + (at - begin), slots.data(), count);
                 });
}

void DenseVariable::assign(std::size_t begin, std::span<const float> values,
                           std::span<const float> slots) {
  check_range("values", begin, values.size());
  if (!slots.empty()) check_count("slots", rule_.slots().size() * values.size(), slots.size());
  for_each_chunk(begin, begin + values.size(), [&](Chunk&, std::size_t at, std::size_t count) {
    copy(element(at), values.data() + (at - begin), count);
    for (std::size_t i = 0; !slots.empty() && i < rule_.slots().size(); ++i) {
      copy(slot(i) + at, slots.data() + i * values.size() + (at - begin), count);
    }
  });
}

std::uint64_t DenseVariable::read_state(std::span<float> values, std::span<float> slots) {
  check_count("values", size_, values.size());
  check_count("slots", slot_floats(), slots.size());
  std::uint64_t step = 0;
  for_each_chunk(0, size_, [&](Chunk& chunk, std::size_t begin, std::size_t count) {
    copy(values.data() + begin, element(begin), count);
    for (std::size_t i = 0; i < rule_.slots().size(); ++i) {
      copy(slots.data() + i * size_ + begin, slot(i) + begin, count);
    }
    step = std::max(step, chunk.step);
  });
  return step;
}

std::uint64_t DenseVariable::step() {
  const std::lock_guard lock(chunks_[0].mutex);
  return chunks_[0].step;
}

void DenseVariable::set_step(std::uint64_t step) {
  for_each_chunk(0, size_, [&](Chunk& chunk, std::size_t, std::size_t) { chunk.step = step; });
}

}  // namespace fastdist::table
