#include "table/nodes.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <climits>

namespace fastdist::table {
namespace {

constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
using Mask = std::array<unsigned long, kMostNodes / kWordBits>;
// The kernel reads one bit less than this.
constexpr unsigned long kMaskBits = kMostNodes + 1;

bool has_own_policy() {
  int mode = MPOL_DEFAULT;
  return syscall(SYS_get_mempolicy, &mode, nullptr, 0UL, nullptr, 0UL) != 0 || mode != MPOL_DEFAULT;
}

}  // namespace

Nodes nodes_allowed() {
  Mask mask{};
  Nodes nodes;
  if (syscall(SYS_get_mempolicy, nullptr, mask.data(), kMaskBits, nullptr, MPOL_F_MEMS_ALLOWED) !=
      0) {
    return nodes;
  }
  for (std::size_t node = 0; node < kMostNodes; ++node) {
    nodes[node] = (mask[node / kWordBits] >> node % kWordBits & 1) != 0;
  }
  return nodes;
}

void spread(std::byte* data, std::size_t bytes, const Nodes& nodes) {
  if (nodes.count() < 2 || has_own_policy()) return;
  Mask mask{};
  for (std::size_t node = 0; node < kMostNodes; ++node) {
    if (nodes[node]) mask[node / kWordBits] |= 1UL << node % kWordBits;
  }
  syscall(SYS_mbind, data, bytes, MPOL_INTERLEAVE, mask.data(), kMaskBits, 0UL);
}

}  // namespace fastdist::table
