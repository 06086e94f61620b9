// A range of host time that NVIDIA's profilers show by its name (NVTX), around the ranges of NCCL.
#pragma once

namespace fastdist::cuda {

// Ranges of one thread must end in the reverse order of their beginnings.
class Range {
 public:
  explicit Range(const char* name) noexcept;
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range();
};

}  // namespace fastdist::cuda
