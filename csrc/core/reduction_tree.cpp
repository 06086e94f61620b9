#include "core/reduction_tree.h"

#include <algorithm>

namespace fastdist {
namespace {

// Returns the first rank of the right half of a node.
int middle(const Subtree& node) {
  const auto ranks = static_cast<unsigned>(node.end - node.begin);
  return node.begin + static_cast<int>(std::bit_ceil(ranks) / 2);
}

void collect(const Subtree& node, std::span<const int> ranks, std::vector<Subtree>& found) {
  const auto first = std::lower_bound(ranks.begin(), ranks.end(), node.begin);
  const auto last = std::lower_bound(first, ranks.end(), node.end);
  if (first == last) return;
  if (last - first == node.end - node.begin) return found.push_back(node);
  collect({node.begin, middle(node)}, ranks, found);
  collect({middle(node), node.end}, ranks, found);
}

// Appends the numbers for the subtrees under a node, of which the first is `at`; returns the next.
std::size_t count(const Subtree& node, std::span<const Subtree> subtrees, std::size_t at,
                  std::vector<std::uint8_t>& after) {
  if (subtrees[at].end == node.end && subtrees[at].begin == node.begin) {
    after.push_back(0);
    return at + 1;
  }
  at = count({node.begin, middle(node)}, subtrees, at, after);
  at = count({middle(node), node.end}, subtrees, at, after);
  ++after.back();
  return at;
}

}  // namespace

std::vector<Subtree> subtrees_of(std::span<const int> ranks, int size) {
  std::vector<Subtree> found;
  collect({0, size}, ranks, found);
  return found;
}

std::vector<std::uint8_t> reductions_of(std::span<const Subtree> subtrees, int size) {
  std::vector<std::uint8_t> after;
  count({0, size}, subtrees, 0, after);
  return after;
}

}  // namespace fastdist
