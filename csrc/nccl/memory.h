// Memory allocated by NCCL and registered with it: as a symmetric window if the system supports
// them, otherwise as a buffer if that succeeds. Each allocation has one registration, from its
// start, since several windows of one allocation have corrupted data in some NCCL versions.
#pragma once

#include <memory>

#include "nccl/engine.h"
#include "nccl/handle.h"

namespace fastdist::nccl {

class NcclMemory final : public Memory {
 public:
  // Every rank must call. The device must be current.
  NcclMemory(std::shared_ptr<Handle> handle, std::size_t bytes, const CallOptions& options);
  ~NcclMemory() override;

  [[nodiscard]] std::byte* data() const noexcept override { return data_.get(); }
  // Waits until no enqueued work can use the memory.
  void wait_for_device() const noexcept;

 private:
  void register_with(std::size_t bytes, const CallOptions& options);

  std::shared_ptr<Handle> handle_;
  std::shared_ptr<std::byte> data_;  // the handle also holds it, until NCCL has ended
  abi::Window window_ = nullptr;
  void* registration_ = nullptr;
};

}  // namespace fastdist::nccl
