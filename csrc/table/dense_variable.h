// A dense variable on a parameter server, with the optimizer's state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "table/kernels.h"
#include "table/memory.h"
#include "table/update_rule.h"

namespace fastdist::table {

// All methods are thread-safe. Each chunk of kChunk elements is read and changed atomically, under
// its own lock: threads follow one another through a large variable instead of waiting for each
// other to finish, and a pull may see a push applied to some chunks only. Each chunk counts its
// pushes, so that the ranges of one gradient may arrive in any order, mixed with those of others.
class DenseVariable {
 public:
  static constexpr std::size_t kChunk = 16384;

  DenseVariable(std::span<const float> initial, UpdateRule rule);

  // Reads the elements from `begin` on, as many as `values` holds.
  void pull(std::size_t begin, std::span<float> values);
  // Applies a step to the elements from `begin` on. `begin` must be a multiple of kChunk.
  void push(std::size_t begin, std::span<const float> gradient,
            std::optional<double> learning_rate);
  // Sets the values from `begin` on and, unless `slots` is empty, their slots: slot after slot.
  void assign(std::size_t begin, std::span<const float> values, std::span<const float> slots);
  // Reads all values and slots in the layout of `assign`; an element's value and slots are
  // consistent. Returns the highest step of a chunk. Chunks that a concurrent push has not reached
  // yet, or never reaches because it fails, lack that step.
  std::uint64_t read_state(std::span<float> values, std::span<float> slots);

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  // The values themselves, which must not be read while another thread changes them.
  [[nodiscard]] std::span<const float> values() const noexcept { return {element(0), size_}; }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return (size_ + slot_floats()) * sizeof(float);
  }
  [[nodiscard]] std::size_t slot_floats() const noexcept { return rule_.slots().size() * size_; }
  // Returns the steps of the first chunk, which every gradient changes.
  [[nodiscard]] std::uint64_t step();
  // Sets the step of all chunks.
  void set_step(std::uint64_t step);

 private:
  struct Chunk {
    std::mutex mutex;
    std::uint64_t step = 0;  // number of pushes that the chunk has seen
  };

  // Calls `call(chunk, begin, count)` for the part of each chunk that is in the range, under the
  // chunk's lock.
  void for_each_chunk(std::size_t begin, std::size_t end, auto&& call);
  void check_range(const char* argument, std::size_t begin, std::size_t count) const;

  [[nodiscard]] float* element(std::size_t i) const noexcept {
    return reinterpret_cast<float*>(values_.get()) + i;
  }
  [[nodiscard]] float* slot(std::size_t i) const noexcept {
    return reinterpret_cast<float*>(slots_.get()) + i * size_;
  }

  UpdateRule rule_;
  std::size_t size_;
  UpdateFunction update_;
  Memory values_;
  Memory slots_;
  std::vector<Chunk> chunks_;  // one more than needed if the last is full, for empty ranges
};

}  // namespace fastdist::table
