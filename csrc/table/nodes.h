// The memory nodes (sockets) of a machine.
#pragma once

#include <bitset>
#include <cstddef>

namespace fastdist::table {

constexpr std::size_t kMostNodes = 1024;
using Nodes = std::bitset<kMostNodes>;

// Those that this process may take memory from; none where the kernel does not say.
[[nodiscard]] Nodes nodes_allowed();

// Has pages that are not real yet come from all nodes in turn: threads of any node use any row.
// Nothing happens where there is one node, where numactl or the like has chosen already, or where
// a container forbids it.
void spread(std::byte* data, std::size_t bytes, const Nodes& nodes);

}  // namespace fastdist::table
