// The partial results that a machine sends: one for each of the largest subtrees of the reduction
// tree whose ranks it has.

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "host/kernels.h"
#include "net/communicator.h"

namespace fastdist::net {

void NetCommunicator::plan_partials() {
  std::vector<std::pair<Subtree, std::size_t>> placed;
  first_partial_ = {0};
  for (int m = 0; m < machines(); ++m) {
    for (const Subtree& ranks : subtrees_of(ranks_of(m), size())) {
      placed.emplace_back(ranks, placed.size());
      const int begin = local_of(ranks.begin);
      if (m == machine_of(rank_)) here_.push_back({begin, begin + ranks.end - ranks.begin});
    }
    first_partial_.push_back(placed.size());
  }
  each_.resize(machines_.size() + 1);
  std::iota(each_.begin(), each_.end(), 0);
  std::ranges::sort(placed, {}, [](const auto& p) { return p.first.begin; });
  std::vector<Subtree> subtrees;
  for (const auto& [ranks, number] : placed) {
    subtrees.push_back(ranks);
    partials_.push_back(number);
  }
  after_ = reductions_of(subtrees, size());
}

// Reduces what the ranks of this machine have given, `stride` bytes apart, to its partial results:
// for each of `parts` parts of `count` elements, one after the other.
void NetCommunicator::reduce_here(const std::byte* gathered, std::size_t stride, DType dtype,
                                  ReduceOp op, std::byte* to, std::size_t parts,
                                  std::size_t count) const {
  const std::size_t bytes = count * size_of(dtype);
  std::vector<const std::byte*> sources;
  for (std::size_t i = 0; i < parts; ++i) {
    for (const Subtree& ranks : here_) {
      sources.clear();
      for (int r = ranks.begin; r < ranks.end; ++r) {
        sources.push_back(gathered + static_cast<std::size_t>(r) * stride + i * bytes);
      }
      host::reduce(dtype, op, to, nullptr, sources, count);
      to += bytes;
    }
  }
}

// --- sums ---------------------------------------------------------------------------------------

DType NetCommunicator::dtype_of_sums(DType dtype) noexcept {
  const bool is_small = dtype == DType::kFloat16 || dtype == DType::kBFloat16 ||
                        dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2;
  return is_small ? DType::kFloat32 : dtype;
}

void NetCommunicator::narrow(DType wide, const std::byte* from, DType dtype, std::byte* to,
                             std::size_t count) {
  if (wide != dtype) {
    host::convert(dtype, to, wide, from, count, 1.0F);
  } else {
    host::copy(to, from, count * size_of(dtype), false);
  }
}

}  // namespace fastdist::net
