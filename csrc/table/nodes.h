// The NUMA nodes of a machine.
#pragma once

#include <bitset>
#include <cstddef>

namespace fastdist::table {

constexpr std::size_t kMostNodes = 1024;
using Nodes = std::bitset<kMostNodes>;

// Returns the nodes that this process may allocate memory from; none if the kernel does not report
// them.
[[nodiscard]] Nodes nodes_allowed();

// Interleaves the uncommitted pages of a range over `nodes`, since threads of any node use any row.
// Does nothing if there is a single node, if a policy is already set (by numactl or similar), or if
// a container forbids it.
void spread(std::byte* data, std::size_t bytes, const Nodes& nodes);

}  // namespace fastdist::table
