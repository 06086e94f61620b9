#include "table/initializer.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "table/kernels.h"
#include "table/mixing.h"

namespace fastdist::table {
namespace {

Distribution distribution_of(std::string_view name) {
  if (name == "constant") return Distribution::kConstant;
  if (name == "uniform") return Distribution::kUniform;
  if (name == "normal") return Distribution::kNormal;
  refuse(ErrorCode::kValue, "unknown initializer: expected constant, uniform or normal, got ",
         name);
}

}  // namespace

Initializer::Initializer(std::string_view distribution, double first, double second)
    : distribution_(distribution_of(distribution)),
      first_(static_cast<float>(first)),
      second_(static_cast<float>(second)) {
  if (!std::isfinite(first_) || !std::isfinite(second_)) {
    refuse(ErrorCode::kValue, "the initializer's numbers must be finite float32, got ", first,
           " and ", second);
  }
  if (distribution_ == Distribution::kUniform && first_ > second_) {
    refuse(ErrorCode::kValue, "uniform must go from the lower to the higher number, got ", first,
           " and ", second);
  }
  if (distribution_ == Distribution::kNormal && second_ < 0) {
    refuse(ErrorCode::kValue, "normal's deviation must not be negative, got ", second);
  }
}

void Initializer::fill(std::span<float> row, std::uint64_t seed, std::uint64_t id) const {
  const std::uint64_t key = mix(mix(id) ^ mix(seed));
  switch (distribution_) {
    case Distribution::kConstant:
      std::fill(row.begin(), row.end(), first_);
      return;
    case Distribution::kUniform:
      return kernels().uniform(row.data(), row.size(), key, first_, second_);
    case Distribution::kNormal:
      return kernels().normal(row.data(), row.size(), key, first_, second_);
  }
}

}  // namespace fastdist::table
