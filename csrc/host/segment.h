// Shared memory of one rank: an anonymous file (memfd) mapped by every rank of the machine.
#pragma once

#include <cstddef>

#include "core/file_descriptor.h"

namespace fastdist::host {

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
  Mapping() = default;
  Mapping(const FileDescriptor& file, std::size_t bytes);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace fastdist::host
