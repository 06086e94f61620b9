#include "table/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace fastdist::table {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kLineBytes = 64;

[[noreturn]] void throw_out_of_memory(std::size_t bytes, const char* what) {
  refuse(ErrorCode::kMemory, "out of memory: ", what, " needs ", bytes, " more bytes");
}

// Maps memory that starts at a huge page boundary, since the kernel gives huge pages for aligned
// ranges only.
Memory map(std::size_t bytes, Pages pages, const char* what) {
  const std::size_t wanted = round_up(bytes, kHugePageBytes);
  const std::size_t mapped = wanted + kHugePageBytes;
  void* address = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw_out_of_memory(bytes, what);
  auto* begin = static_cast<std::byte*>(address);
  const std::size_t before = round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePageBytes) -
                             reinterpret_cast<std::uintptr_t>(begin);
  if (before != 0) munmap(begin, before);
  munmap(begin + before + wanted, kHugePageBytes - before);
  if (pages == Pages::kHuge) madvise(begin + before, wanted, MADV_HUGEPAGE);
  return Memory(begin + before, MemoryRelease{wanted});
}

}  // namespace

void MemoryRelease::operator()(std::byte* data) const noexcept {
  if (mapped_bytes != 0) {
    munmap(data, mapped_bytes);
  } else {
    std::free(data);
  }
}

Memory allocate(std::size_t bytes, Pages pages, const char* what) {
  if (bytes > SIZE_MAX / 2) throw_out_of_memory(bytes, what);
  if (bytes >= kHugePageBytes) return map(bytes, pages, what);
  const std::size_t rounded = round_up(bytes + 1, kLineBytes);
  void* data = std::aligned_alloc(kLineBytes, rounded);
  if (data == nullptr) throw_out_of_memory(bytes, what);
  std::memset(data, 0, rounded);
  return Memory(static_cast<std::byte*>(data), MemoryRelease{});
}

// --- rows ---------------------------------------------------------------------------------------

namespace {

constexpr std::size_t kBlockBytes = std::size_t{16} << 20;
constexpr std::size_t kLeastBlockRows = 4096;
// A larger mapping has too many rows to use all of them soon, and a huge page for each used row
// would take long to clear and need more memory than the rows.
constexpr std::size_t kMostHugeBytes = std::size_t{1} << 30;
constexpr const char* kWhat = "a table's rows";

std::size_t block_rows(std::size_t stride) {
  return std::bit_floor(std::max(kBlockBytes / stride, kLeastBlockRows));
}

}  // namespace

RowArena::RowArena(std::size_t stride)
    : stride_(stride),
      block_bits_(static_cast<unsigned>(std::countr_zero(block_rows(stride)))),
      block_mask_(static_cast<RowNumber>(block_rows(stride) - 1)),
      block_array_(allocate((kMaxRows >> block_bits_) * sizeof(std::byte*), Pages::kSmall, kWhat)) {
}

RowNumber RowArena::take(std::uint32_t count) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t first = taken_.load(std::memory_order_relaxed);
  const std::uint64_t end = first + count;
  if (end > kMaxRows) refuse(ErrorCode::kMemory, "a table holds at most 2^31 rows");
  const std::size_t needed = (end + block_mask_) >> block_bits_;
  if (blocks_used_ < needed) {
    const std::size_t block_bytes = stride_ << block_bits_;
    const std::size_t bytes = (needed - blocks_used_) * block_bytes;
    // Small pages for a single first block: a small table should not take a huge page.
    const bool is_small = needed == 1;
    const Pages pages = is_small || bytes > kMostHugeBytes ? Pages::kSmall : Pages::kHuge;
    owned_.push_back(allocate(bytes, pages, kWhat));
    for (std::byte* block = owned_.back().get(); blocks_used_ < needed; block += block_bytes) {
      blocks()[blocks_used_++] = block;
    }
  }
  taken_.store(end, std::memory_order_relaxed);
  return static_cast<RowNumber>(first);
}

}  // namespace fastdist::table
