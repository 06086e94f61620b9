// Initial values of rows. Element i of a row depends only on (seed, id, i), so a row is the same on
// every server and every processor, whenever it is created.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace fastdist::table {

enum class Distribution : std::uint8_t { kConstant, kUniform, kNormal };

class Initializer {
 public:
  // `first` and `second` are, for constant, the value and an ignored number; for uniform, the lower
  // and upper bound; for normal, mean and standard deviation. Throws kValue.
  Initializer(std::string_view distribution, double first, double second);

  void fill(std::span<float> row, std::uint64_t seed, std::uint64_t id) const;

 private:
  Distribution distribution_;
  float first_;
  float second_;
};

}  // namespace fastdist::table
