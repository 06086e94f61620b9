// The ranks of one machine and their shared memory, as seen by one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/file_descriptor.h"
#include "core/noncopyable.h"
#include "core/process.h"

namespace fastdist::host {

// A segment is the shared memory of one rank: an anonymous file (memfd) mapped by every rank.

// Creates a memfd of `bytes` zero bytes that can grow but never shrink (so that no peer can be made
// to fault). This process holds a record lock on the file until it ends: see `is_locked_by_other`.
[[nodiscard]] FileDescriptor create_segment_file(std::size_t bytes);

// Returns true while the process that called `create_segment_file` is alive. The kernel releases
// record locks when their process ends for any reason; a forked child does not inherit them.
[[nodiscard]] bool is_locked_by_other(const FileDescriptor& file) noexcept;

// Grows the file to at least `bytes`. New pages read as zero and use memory once touched.
void grow(const FileDescriptor& file, std::size_t bytes);

// Returns the memory of a range to the system; the range reads as zero afterwards.
void discard(const FileDescriptor& file, std::size_t offset, std::size_t bytes) noexcept;

// Maps the first `bytes` of a file, which may extend beyond its current end: when the owner grows
// the file, every mapping sees the new pages. Throws kMemory if the address space is limited.
class Mapping {
 public:
  Mapping(const FileDescriptor& file, std::size_t bytes);

  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::size_t size() const noexcept { return data_.get_deleter().bytes; }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* data) const noexcept;
  };
  std::unique_ptr<std::byte, Unmap> data_;
};

// Allocates ranges of one rank's segment, in whole pages. Thread-safe.
class Heap {
 public:
  explicit Heap(std::size_t capacity) : capacity_(capacity) {}

  // Returns the offset of an unused range of `bytes` bytes; throws kMemory if the window is full.
  [[nodiscard]] std::size_t take(std::size_t bytes);
  void give(std::size_t offset, std::size_t bytes);

 private:
  std::mutex mutex_;
  std::size_t capacity_;
  std::size_t end_ = 0;
  std::map<std::size_t, std::size_t> free_;  // offset → bytes, no two adjacent
};

class Machine;

// A range of this rank's segment, freed on destruction.
class SharedBlock : NonCopyable {
 public:
  SharedBlock(std::shared_ptr<Machine> machine, int rank, std::size_t bytes);
  ~SharedBlock();

  [[nodiscard]] std::size_t offset() const noexcept { return offset_; }
  [[nodiscard]] std::byte* data() const noexcept;

 private:
  friend class Machine;
  std::shared_ptr<Machine> machine_;  // null once retired
  int rank_;
  std::size_t bytes_;
  std::size_t offset_;
  int generation_ = process_generation();
};

class Machine {
 public:
  // The machine of ranks that are processes. `files[r]` is rank r's segment; this process created
  // `files[self]`.
  Machine(std::vector<FileDescriptor> files, int self);
  // Makes the machine of ranks that are threads of this process, which can read every address.
  static std::shared_ptr<Machine> of_threads(int size);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(segments_.size()); }
  [[nodiscard]] bool one_process() const noexcept { return self_ < 0; }
  [[nodiscard]] std::byte* window(int rank) const noexcept {
    return segments_[static_cast<std::size_t>(rank)].mapping.data();
  }
  [[nodiscard]] std::size_t window_bytes() const noexcept { return segments_[0].mapping.size(); }
  // Takes ownership of the range of `block`, and frees it once `unused` returns true, which is
  // checked now and in later calls. If the machine is destroyed first, the range stays valid for
  // peers that have it mapped.
  void retire(const std::shared_ptr<SharedBlock>& block, std::function<bool()> unused);
  // Frees no more blocks until `unused` returns true, as another rank may still write into them.
  void keep_blocks_until(std::function<bool()> unused);

  // Returns false once the rank's process has ended.
  [[nodiscard]] bool is_alive(int rank) const noexcept;

  // Returns a word with which every process finds `data` in the window of `rank`; 0 if it lies
  // elsewhere.
  [[nodiscard]] std::uint64_t locate(int rank, const std::byte* data) const noexcept;
  [[nodiscard]] std::byte* find(int rank, std::uint64_t location) const noexcept;

 private:
  friend class SharedBlock;
  struct Segment {
    FileDescriptor file;
    Mapping mapping;
    std::unique_ptr<Heap> heap;
  };

  // Holds a range and not the block, since block and machine would keep each other alive.
  struct Retired {
    int rank;
    std::size_t offset;
    std::size_t bytes;
    std::function<bool()> unused;
  };
  void sweep();
  void free(const Retired& range);
  void give(int rank, std::size_t offset, std::size_t bytes) noexcept;

  std::vector<Segment> segments_;
  std::mutex retired_mutex_;
  std::vector<Retired> retired_;
  std::vector<std::function<bool()>> holds_;
  int generation_ = process_generation();
  int self_;  // this process's rank, or -1 if all ranks are threads of this process
};

}  // namespace fastdist::host
