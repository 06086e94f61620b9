#include "host/machine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <iterator>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/types.h"

namespace fastdist::host {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSmallestWindow = std::size_t{64} << 20;
constexpr std::size_t kAddressSpace = std::size_t{1} << 44;  // of 2^47, shared by all windows

std::size_t in_pages(std::size_t bytes) { return std::max(kPage, round_up(bytes, kPage)); }

// Returns the most that a rank could fill, the machine's memory, or less if the address space
// cannot hold all windows.
std::size_t window_size(std::size_t ranks) {
  const auto physical = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
                        static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return std::bit_floor(std::min(std::bit_ceil(physical), kAddressSpace / ranks));
}

constexpr struct flock kRecordLock{
    .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1, .l_pid = 0};

}  // namespace

std::size_t Heap::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes = in_pages(std::min(bytes, capacity_ + 1));  // avoids overflow; capacity_ + 1 never fits
  const auto fit = std::find_if(free_.begin(), free_.end(),
                                [bytes](const auto& range) { return range.second >= bytes; });
  if (fit != free_.end()) {
    const auto [offset, available] = *fit;
    free_.erase(fit);
    if (available > bytes) free_.emplace(offset + bytes, available - bytes);
    return offset;
  }
  if (bytes > capacity_ - end_) {
    refuse(ErrorCode::kMemory, "shared memory is full: requested ", bytes, " bytes, ",
           capacity_ - end_, " bytes left in this rank's window");
  }
  return std::exchange(end_, end_ + bytes);
}

void Heap::give(std::size_t offset, std::size_t bytes) {
  bytes = in_pages(bytes);
  const std::lock_guard lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

SharedBlock::SharedBlock(std::shared_ptr<Machine> machine, int rank, std::size_t bytes)
    : machine_(std::move(machine)), rank_(rank), bytes_(bytes) {
  if (machine_->generation_ != process_generation()) {
    throw Error(ErrorCode::kState,
                "shared memory belongs to the parent process; a forked child "
                "cannot allocate it");
  }
  machine_->sweep();
  Machine::Segment& segment = machine_->segments_[static_cast<std::size_t>(rank)];
  offset_ = segment.heap->take(bytes);
  try {
    grow(segment.file, offset_ + in_pages(bytes));
  } catch (...) {
    segment.heap->give(offset_, bytes);
    throw;
  }
}

SharedBlock::~SharedBlock() {
  if (!machine_ || generation_ != process_generation()) return;  // a forked child's copy
  machine_->free({rank_, offset_, bytes_, {}});
}

std::byte* SharedBlock::data() const noexcept { return machine_->window(rank_) + offset_; }

// All windows of a process have the same size, the largest that the address space has room for,
// plus one page. The kernel maps them next to each other; without the page, equal arrays of two
// ranks would differ only in high address bits. Zen processors predict the way of the first-level
// cache from bits 12 to 27: if those agree, each access to one array evicts the other (reducing in
// place took seven times as long).
Machine::Machine(std::vector<FileDescriptor> files, int self) : self_(self) {
  std::vector<Mapping> mappings;
  for (std::size_t window = window_size(files.size()); mappings.empty(); window /= 2) {
    try {
      for (const FileDescriptor& file : files) mappings.emplace_back(file, window + kPage);
    } catch (const Error&) {
      if (window <= kSmallestWindow) throw;
      mappings.clear();
    }
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    auto heap = std::make_unique<Heap>(mappings[i].size());
    segments_.push_back({std::move(files[i]), std::move(mappings[i]), std::move(heap)});
  }
}

std::shared_ptr<Machine> Machine::of_threads(int size) {
  std::vector<FileDescriptor> files;
  for (int rank = 0; rank < size; ++rank) files.push_back(create_segment_file(0));
  return std::make_shared<Machine>(std::move(files), -1);
}

void Machine::give(int rank, std::size_t offset, std::size_t bytes) noexcept {
  Segment& segment = segments_[static_cast<std::size_t>(rank)];
  discard(segment.file, offset, in_pages(bytes));
  segment.heap->give(offset, bytes);
}

void Machine::retire(const std::shared_ptr<SharedBlock>& block, std::function<bool()> unused) {
  {
    const std::lock_guard lock(retired_mutex_);
    retired_.push_back({block->rank_, block->offset_, block->bytes_, std::move(unused)});
    block->machine_.reset();
  }
  sweep();
}

void Machine::keep_blocks_until(std::function<bool()> unused) {
  const std::lock_guard lock(retired_mutex_);
  holds_.push_back(std::move(unused));
}

void Machine::free(const Retired& range) {
  const std::lock_guard lock(retired_mutex_);
  const auto are_unused = [](auto& holds) {
    std::erase_if(holds, [](const auto& unused) { return unused(); });
    return holds.empty();
  };
  if (are_unused(holds_)) return give(range.rank, range.offset, range.bytes);
  retired_.push_back({range.rank, range.offset, range.bytes,
                      [are_unused, holds = holds_]() mutable { return are_unused(holds); }});
}

void Machine::sweep() {
  const std::lock_guard lock(retired_mutex_);
  std::erase_if(retired_, [this](const Retired& r) {
    if (!r.unused()) return false;
    give(r.rank, r.offset, r.bytes);
    return true;
  });
}

bool Machine::is_alive(int rank) const noexcept {
  if (one_process() || rank == self_) return true;
  return is_locked_by_other(segments_[static_cast<std::size_t>(rank)].file);
}

std::uint64_t Machine::locate(int rank, const std::byte* data) const noexcept {
  const auto offset = static_cast<std::uint64_t>(data - window(rank));
  return offset < window_bytes() ? offset + 1 : 0;
}

std::byte* Machine::find(int rank, std::uint64_t location) const noexcept {
  return window(rank) + (location - 1);
}

// --- segments -----------------------------------------------------------------------------------

FileDescriptor create_segment_file(std::size_t bytes) {
  FileDescriptor file(::memfd_create("fastdist", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) throw system_error("memfd_create");
  struct flock lock = kRecordLock;
  if (::fcntl(file.get(), F_SETLK, &lock) != 0) throw system_error("locking shared memory");
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    throw system_error("sealing shared memory");
  }
  grow(file, bytes);
  return file;
}

bool is_locked_by_other(const FileDescriptor& file) noexcept {
  struct flock lock = kRecordLock;
  if (::fcntl(file.get(), F_GETLK, &lock) != 0) return false;
  return lock.l_type != F_UNLCK;
}

void grow(const FileDescriptor& file, std::size_t bytes) {
  struct stat status{};
  if (::fstat(file.get(), &status) != 0) throw system_error("fstat on shared memory");
  if (static_cast<std::size_t>(status.st_size) >= bytes) return;
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    // Another thread has grown the file meanwhile, and it cannot shrink.
    if (errno == EPERM) return;
    throw system_error("growing shared memory to " + std::to_string(bytes) + " bytes");
  }
}

void discard(const FileDescriptor& file, std::size_t offset, std::size_t bytes) noexcept {
  ::fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
}

Mapping::Mapping(const FileDescriptor& file, std::size_t bytes) {
  void* data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(), 0);
  if (data == MAP_FAILED) {
    refuse(ErrorCode::kMemory, "cannot map ", bytes >> 20,
           " MiB of address space for shared memory; is there a limit (ulimit -v)?");
  }
  data_ = {static_cast<std::byte*>(data), Unmap{bytes}};
  ::madvise(data, bytes, MADV_HUGEPAGE);  // a hint: most kernels ignore it for shared memory
}

void Mapping::Unmap::operator()(std::byte* data) const noexcept { ::munmap(data, bytes); }

}  // namespace fastdist::host
