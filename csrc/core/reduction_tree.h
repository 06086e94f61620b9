// The order in which the values of ranks are reduced: one binary tree over the ranks' numbers,
// ((r0 ∘ r1) ∘ (r2 ∘ r3)) ∘ ((r4 ∘ r5) ∘ …), on whichever machines they run. So a result has the
// same bits wherever the ranks are.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fastdist {

// The ranks [begin, end) under a node of the tree.
struct Subtree {
  int begin;
  int end;
};

// Returns how many reductions follow once value `i` of `n` is known. Each takes the last two
// results.
[[nodiscard]] constexpr std::uint8_t reductions_after(std::size_t i, std::size_t n) noexcept {
  return static_cast<std::uint8_t>(i + 1 < n ? std::countr_one(i) : std::popcount(i));
}

// Returns the largest subtrees of the tree over `size` ranks that have only the given ranks, which
// ascend.
[[nodiscard]] std::vector<Subtree> subtrees_of(std::span<const int> ranks, int size);

// Returns how many reductions follow each value, where the values are those of subtrees that make
// up the tree over `size` ranks, in ascending order.
[[nodiscard]] std::vector<std::uint8_t> reductions_of(std::span<const Subtree> subtrees, int size);

}  // namespace fastdist
