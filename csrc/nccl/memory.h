// Memory allocated by NCCL and registered with it: as a symmetric window if every rank gets one,
// otherwise as a buffer if that succeeds. Each allocation has one registration, from its start,
// since several windows of one allocation have corrupted data in some NCCL versions.
#pragma once

#include <memory>
#include <optional>

#include "nccl/engine.h"
#include "nccl/handle.h"

namespace fastdist::nccl {

// Must be called on every rank after it has tried to allocate `bytes` of device memory, with its
// error if that failed. Throws on all ranks if any has failed. `checker` may be null: then only
// this rank counts.
void agree_on_memory(std::size_t bytes, const std::optional<Error>& failure,
                     const CallOptions& options, Checker* checker);

// Memory owned by the caller, registered with NCCL, which can then use it without a copy.
class Registration {
 public:
  // The device must be current. Throws if NCCL refuses.
  Registration(std::shared_ptr<Handle> handle, std::byte* data, std::size_t bytes,
               const CallOptions& options);
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  ~Registration();

 private:
  std::shared_ptr<Handle> handle_;
  void* registration_ = nullptr;
};

class NcclMemory {
 public:
  // Every rank must call. The device must be current. `checker` may be null: then all ranks must
  // get a window, or none.
  NcclMemory(std::shared_ptr<Handle> handle, std::size_t bytes, const CallOptions& options,
             Checker* checker);
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;
  ~NcclMemory();

  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  // Waits until no enqueued work can use the memory.
  void wait_for_device() const noexcept;

 private:
  // Returns true if the memory is a window now.
  [[nodiscard]] bool make_window(std::size_t bytes, const CallOptions& options, Checker* checker);

  std::shared_ptr<Handle> handle_;
  std::shared_ptr<std::byte> data_;  // the handle also holds it, until NCCL has ended
  abi::Window window_ = nullptr;
  std::optional<Registration> registration_;
};

}  // namespace fastdist::nccl
