// Zeroed memory for tables, spread over NUMA nodes.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

namespace fastdist::table {

[[nodiscard]] constexpr std::size_t round_up(std::size_t value, std::size_t step) noexcept {
  return (value + step - 1) / step * step;
}

struct MemoryRelease {
  std::size_t mapped_bytes = 0;  // 0 for memory from malloc
  void operator()(std::byte* data) const noexcept;
};
using Memory = std::unique_ptr<std::byte, MemoryRelease>;

// Huge pages, if the kernel provides them, make random accesses faster, but memory is committed in
// larger units.
enum class Pages { kSmall, kHuge };

// Allocates zeroed memory aligned to cache lines. Large memory is committed page by page when
// touched. Throws kMemory; `what` names the purpose.
[[nodiscard]] Memory allocate(std::size_t bytes, Pages pages, const char* what);

// A set of NUMA nodes: one bit per node, as the kernel takes it.
using Nodes = std::array<unsigned long, 16>;

// Returns the nodes that this process may allocate memory from; none if the kernel does not report
// them.
[[nodiscard]] Nodes nodes_allowed();

// Interleaves the uncommitted pages of a range over `nodes`, since threads of any node use any row.
// Does nothing if there is a single node, if a policy is already set (by numactl or similar), or if
// a container forbids it.
void spread(std::byte* data, std::size_t bytes, const Nodes& nodes);

}  // namespace fastdist::table
