// Zeroed memory for tables.
#pragma once

#include <cstddef>
#include <memory>

namespace fastdist::table {

struct MemoryRelease {
  std::size_t mapped_bytes = 0;  // 0: from malloc
  void operator()(std::byte* data) const noexcept;
};
using Memory = std::unique_ptr<std::byte, MemoryRelease>;

// Huge pages, where the kernel gives them, make random accesses faster, and become real in larger
// pieces.
enum class Pages { kSmall, kHuge };

// Zeroed, and aligned to cache lines. Large memory becomes real page by page when it is touched.
// Throws kMemory; `what` says what it was for.
[[nodiscard]] Memory allocate(std::size_t bytes, Pages pages, const char* what);

// Throws kMemory if this machine has less memory than that, used or not.
void check_machine_has(std::size_t bytes, const char* what);

}  // namespace fastdist::table
