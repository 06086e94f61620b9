// What rows begin as. Element i of a row depends on (seed, id, i) only: a row is the same whichever
// server makes it, whenever, and on whatever processor.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace fastdist::table {

enum class Distribution : std::uint8_t { kConstant, kUniform, kNormal };

class Initializer {
 public:
  // constant: the value, ignored; uniform: from, to; normal: mean, standard deviation. Throws
  // kValue.
  Initializer(std::string_view distribution, double first, double second, std::uint64_t seed);

  void fill(std::span<float> row, std::uint64_t id) const;

 private:
  Distribution distribution_;
  float first_;
  float second_;
  std::uint64_t seed_key_;
};

}  // namespace fastdist::table
