// A dense variable on a parameter server, with the optimizer's state.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "table/kernels.h"
#include "table/memory.h"
#include "table/row_layout.h"
#include "table/update_rule.h"

namespace fastdist::table {

// Any number of threads may call anything at the same time. Each chunk of kChunk elements is read
// and changed as a whole, under a lock of its own: threads follow one another through a large
// variable instead of waiting for each other's end, and a pull of one may see a push half done,
// chunk by chunk.
class DenseVariable {
 public:
  static constexpr std::size_t kChunk = 16384;

  // Storage is float32 or bfloat16; with the latter, steps are computed in float32 and their
  // results rounded once.
  DenseVariable(std::span<const float> initial, UpdateRule rule, Storage storage,
                Rounding rounding = Rounding::kNearest);

  void pull(std::span<float> values);
  // One step.
  void push(std::span<const float> gradient, std::optional<double> learning_rate);
  // The elements from `begin` on, as many as there is room for.
  void pull_part(std::span<float> values, std::size_t begin);
  // Begins a step, whose parts are pushed by whoever may: each element once. Returns its number.
  std::uint64_t begin_step() noexcept { return step_.fetch_add(1, std::memory_order_relaxed) + 1; }
  // The part of a step that begins with element `begin`.
  void push_part(std::span<const float> gradient, std::size_t begin, std::uint64_t step,
                 std::optional<double> learning_rate);
  // Sets the values and, unless `slots` is empty, the slots: slot after slot, each as large as the
  // variable.
  void assign(std::span<const float> values, std::span<const float> slots);
  // Values and slots as `assign` takes them; an element's are of one moment. Returns the last step
  // that any element read has seen: no element has seen more, and those that a push reaches
  // meanwhile may lack it, as they do where a push is stopped half done.
  std::uint64_t read_state(std::span<float> values, std::span<float> slots);

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept;
  [[nodiscard]] std::size_t slot_floats() const noexcept { return rule_.slots().size() * size_; }
  [[nodiscard]] std::uint64_t step() const noexcept {
    return step_.load(std::memory_order_relaxed);
  }
  // That of all elements.
  void set_step(std::uint64_t step);

 private:
  struct Chunk {
    std::mutex mutex;
    std::uint64_t step = 0;  // the last that has changed it
  };

  // Calls `call(chunk, begin, count)` for each chunk of a range, or what of it is in the range,
  // under its lock.
  template <class Call>
  void for_each_chunk(std::size_t begin, std::size_t end, Call&& call);
  void check_range(const char* argument, std::size_t begin, std::size_t count) const;
  void read(float* values, std::size_t begin, std::size_t count) const;
  void write(const float* values, std::size_t begin, std::size_t count);
  void update(const Coefficients& c, const float* gradient, std::size_t begin, std::size_t count,
              std::uint64_t step);

  [[nodiscard]] float* slot(std::size_t i) const noexcept {
    return reinterpret_cast<float*>(slots_.get()) + i * size_;
  }

  UpdateRule rule_;
  Storage storage_;
  Rounding rounding_;
  std::size_t size_;
  UpdateFunction update_;
  Memory values_;
  Memory slots_;
  std::vector<Chunk> chunks_;
  std::atomic<std::uint64_t> step_{0};
};

}  // namespace fastdist::table
