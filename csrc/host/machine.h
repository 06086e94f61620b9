// The ranks of one machine and the shared memory of each, as one rank sees them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/process.h"
#include "host/segment.h"

namespace fastdist::host {

// Hands out ranges of one rank's segment, in whole pages. Thread safe.
class Heap {
 public:
  explicit Heap(std::size_t capacity) : capacity_(capacity) {}

  // The offset of `bytes` bytes that nobody else has; throws kMemory when the window is full.
  [[nodiscard]] std::size_t take(std::size_t bytes);
  void give(std::size_t offset, std::size_t bytes);

 private:
  std::mutex mutex_;
  std::size_t capacity_;
  std::size_t end_ = 0;
  std::map<std::size_t, std::size_t> free_;  // offset → bytes, no two adjacent
};

class Machine;

// A range of this rank's segment; gives its memory back when destroyed.
class SharedBlock {
 public:
  SharedBlock(std::shared_ptr<Machine> machine, int rank, std::size_t bytes);
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;
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
  // Ranks as processes: `files[r]` is rank r's segment; this process made `files[self]`.
  static std::shared_ptr<Machine> of_processes(std::vector<FileDescriptor> files, int self);
  // Ranks as threads of this process: every address is readable by every rank.
  static std::shared_ptr<Machine> of_threads(int size);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(segments_.size()); }
  [[nodiscard]] bool one_process() const noexcept { return self_ < 0; }
  [[nodiscard]] std::byte* window(int rank) const noexcept {
    return segments_[static_cast<std::size_t>(rank)].mapping.data();
  }
  [[nodiscard]] std::size_t window_bytes() const noexcept { return segments_[0].mapping.size(); }
  // Takes the range of `block` over, and gives it back when `unused` says that no rank reads it any
  // more; asked now and at later calls. Where the machine goes first, the range stays as it is for
  // peers that have it mapped.
  void retire(const std::shared_ptr<SharedBlock>& block, std::function<bool()> unused);

  // False once the process of that rank has ended.
  [[nodiscard]] bool is_alive(int rank) const noexcept;

  // A word that lets every rank of the machine find `data`: its address where ranks are threads,
  // its offset in the window of `rank` where they are processes; 0 when others cannot reach it.
  [[nodiscard]] std::uint64_t locate(int rank, const std::byte* data) const noexcept;
  [[nodiscard]] std::byte* find(int rank, std::uint64_t location) const noexcept;

 private:
  friend class SharedBlock;
  struct Segment {
    FileDescriptor file;
    Mapping mapping;
    std::unique_ptr<Heap> heap;
  };

  Machine(std::vector<FileDescriptor> files, int self);

  // A range, not the block: a block would keep the machine, and the machine the block, for ever.
  struct Retired {
    int rank;
    std::size_t offset;
    std::size_t bytes;
    std::function<bool()> unused;
  };
  void sweep();
  void give(int rank, std::size_t offset, std::size_t bytes) noexcept;

  std::vector<Segment> segments_;
  std::mutex retired_mutex_;
  std::vector<Retired> retired_;
  int generation_ = process_generation();
  int self_;  // this process's rank; -1 where all ranks are threads of it
};

}  // namespace fastdist::host
