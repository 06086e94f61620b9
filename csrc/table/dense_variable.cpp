#include "table/dense_variable.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"

namespace fastdist::table {
namespace {

constexpr std::size_t kMaxSlots = 3;

std::size_t item_bytes(Storage storage) {
  return storage == Storage::kFloat32 ? sizeof(float) : sizeof(std::uint16_t);
}

// Copies in pieces that memcpy copies with vector instructions. For larger sizes memcpy uses `rep
// movsb`, which falls to a few GB/s on Zen 3 and 4 if dst is just behind src modulo 4096, as a
// numpy array is.
void copy(float* dst, const float* src, std::size_t count) {
  constexpr std::size_t kPiece = 256;
  for (; count > kPiece; count -= kPiece, dst += kPiece, src += kPiece) {
    std::memcpy(dst, src, kPiece * sizeof(float));
  }
  std::memcpy(dst, src, count * sizeof(float));
}

void check_count(const char* argument, std::size_t expected, std::size_t got) {
  if (got == expected) return;
  throw Error(ErrorCode::kValue, std::string(argument) + " must hold " + std::to_string(expected) +
                                     " elements, got " + std::to_string(got));
}

}  // namespace

DenseVariable::DenseVariable(std::span<const float> initial, UpdateRule rule, Storage storage)
    : rule_(std::move(rule)),
      storage_(storage),
      size_(initial.size()),
      update_(kernels().update(rule_.kind())),
      chunks_((size_ + kChunk - 1) / kChunk) {
  if (storage == Storage::kInt8) {
    throw Error(ErrorCode::kValue,
                "a dense variable's storage must be float32 or bfloat16, got int8");
  }
  if (rule_.is_row_wise()) {
    throw Error(ErrorCode::kValue, std::string(rule_.name()) +
                                       " updates rows of tables, not dense variables: they take "
                                       "Adagrad");
  }
  values_ = allocate(size_ * item_bytes(storage_), Pages::kHuge, "a variable");
  slots_ = allocate(slot_floats() * sizeof(float), Pages::kHuge, "a variable's slots");
  if (size_ != 0) write(initial.data(), 0, size_);
  for (std::size_t i = 0; i < rule_.slots().size(); ++i) {
    std::fill_n(slot(i), size_, rule_.slots()[i].initial);
  }
}

std::size_t DenseVariable::bytes() const noexcept {
  return size_ * item_bytes(storage_) + slot_floats() * sizeof(float);
}

template <class Call>
void DenseVariable::for_each_chunk(std::size_t begin, std::size_t end, Call&& call) {
  while (begin < end) {
    const std::size_t number = begin / kChunk;
    const std::size_t count = std::min(end, (number + 1) * kChunk) - begin;
    const std::lock_guard lock(chunks_[number].mutex);
    call(chunks_[number], begin, count);
    begin += count;
  }
}

void DenseVariable::check_range(const char* argument, std::size_t begin, std::size_t count) const {
  if (begin <= size_ && count <= size_ - begin) return;
  throw Error(ErrorCode::kIndex, std::string(argument) + " holds " + std::to_string(count) +
                                     " elements from " + std::to_string(begin) +
                                     " on, the variable has " + std::to_string(size_));
}

void DenseVariable::read(float* values, std::size_t begin, std::size_t count) const {
  const std::byte* from = values_.get() + begin * item_bytes(storage_);
  if (storage_ == Storage::kFloat32) {
    copy(values, reinterpret_cast<const float*>(from), count);
  } else {
    kernels().widen_bfloat16(values, reinterpret_cast<const std::uint16_t*>(from), count);
  }
}

void DenseVariable::write(const float* values, std::size_t begin, std::size_t count) {
  std::byte* to = values_.get() + begin * item_bytes(storage_);
  if (storage_ == Storage::kFloat32) {
    copy(reinterpret_cast<float*>(to), values, count);
  } else {
    kernels().narrow_bfloat16(reinterpret_cast<std::uint16_t*>(to), values, count);
  }
}

void DenseVariable::update(const Coefficients& c, const float* gradient, std::size_t begin,
                           std::size_t count) {
  std::array<float*, kMaxSlots> slots{};
  for (std::size_t i = 0; i < rule_.slots().size(); ++i) slots[i] = slot(i) + begin;
  if (storage_ == Storage::kFloat32) {
    float* values = reinterpret_cast<float*>(values_.get()) + begin;
    return update_(c, values, gradient, slots.data(), count);
  }
  std::array<float, 1024> values;
  for (std::size_t done = 0; done < count;) {
    const std::size_t part = std::min(values.size(), count - done);
    read(values.data(), begin + done, part);
    update_(c, values.data(), gradient + done, slots.data(), part);
    write(values.data(), begin + done, part);
    for (float*& slot : slots) {
      if (slot != nullptr) slot += part;
    }
    done += part;
  }
}

void DenseVariable::pull(std::span<float> values) {
  check_count("values", size_, values.size());
  pull_part(values, 0);
}

void DenseVariable::pull_part(std::span<float> values, std::size_t begin) {
  check_range("values", begin, values.size());
  for_each_chunk(begin, begin + values.size(), [&](Chunk&, std::size_t at, std::size_t count) {
    read(values.data() + (at - begin), at, count);
  });
}

void DenseVariable::push(std::span<const float> gradient, std::optional<double> learning_rate) {
  check_count("gradient", size_, gradient.size());
  const double lr = rule_.learning_rate(learning_rate);
  push_part(gradient, 0, begin_step(), lr);
}

void DenseVariable::push_part(std::span<const float> gradient, std::size_t begin,
                              std::uint64_t step, std::optional<double> learning_rate) {
  check_range("gradient", begin, gradient.size());
  const double lr = rule_.learning_rate(learning_rate);
  const Coefficients c = rule_.coefficients(step, lr, Gradients::kDense);
  for_each_chunk(begin, begin + gradient.size(),
                 [&](Chunk& chunk, std::size_t at, std::size_t count) {
                   update(c, gradient.data() + (at - begin), at, count);
                   chunk.step = std::max(chunk.step, step);  // steps may arrive in any order
                 });
}

void DenseVariable::assign(std::span<const float> values, std::span<const float> slots) {
  check_count("values", size_, values.size());
  if (!slots.empty()) check_count("slots", slot_floats(), slots.size());
  for_each_chunk(0, size_, [&](Chunk&, std::size_t begin, std::size_t count) {
    write(values.data() + begin, begin, count);
    for (std::size_t i = 0; !slots.empty() && i < rule_.slots().size(); ++i) {
      copy(slot(i) + begin, slots.data() + i * size_ + begin, count);
    }
  });
}

std::uint64_t DenseVariable::read_state(std::span<float> values, std::span<float> slots) {
  check_count("values", size_, values.size());
  check_count("slots", slot_floats(), slots.size());
  if (size_ == 0) return step();
  std::uint64_t step = 0;
  for_each_chunk(0, size_, [&](Chunk& chunk, std::size_t begin, std::size_t count) {
    read(values.data() + begin, begin, count);
    for (std::size_t i = 0; i < rule_.slots().size(); ++i) {
      copy(slots.data() + i * size_ + begin, slot(i) + begin, count);
    }
    step = std::max(step, chunk.step);
  });
  return step;
}

void DenseVariable::set_step(std::uint64_t step) {
  step_.store(step, std::memory_order_relaxed);
  for_each_chunk(0, size_, [&](Chunk& chunk, std::size_t, std::size_t) { chunk.step = step; });
}

}  // namespace fastdist::table
