// Memory that NCCL allocated and knows: as a symmetric window where the system has them, else as a
// registered buffer, else as it is. One registration per allocation, from its beginning: several
// windows of one allocation have corrupted data in some versions.
#pragma once

#include <memory>

#include "nccl/engine.h"
#include "nccl/handle.h"

namespace fastdist::nccl {

class NcclMemory final : public Memory {
 public:
  // A collective call. The device is current.
  NcclMemory(std::shared_ptr<Handle> handle, std::size_t bytes, const CallOptions& options);
  ~NcclMemory() override;

  [[nodiscard]] std::byte* data() const noexcept override { return data_.get(); }
  // Until nothing that was enqueued can be at the memory.
  void wait_for_device() const noexcept;

 private:
  void register_with(std::size_t bytes, const CallOptions& options);

  std::shared_ptr<Handle> handle_;
  std::shared_ptr<std::byte> data_;  // NCCL's, and held by the handle until NCCL has ended
  abi::Window window_ = nullptr;
  void* registration_ = nullptr;
};

}  // namespace fastdist::nccl
