// Zeroed memory for tables.
#pragma once

#include <cstddef>
#include <memory>

namespace fastdist::table {

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

// Throws kMemory if `bytes` exceeds the machine's total memory.
void check_machine_has(std::size_t bytes, const char* what);

}  // namespace fastdist::table
