#include "nccl/memory.h"

#include <algorithm>
#include <string>

#include "cuda/check.h"

namespace fastdist::nccl {

NcclMemory::NcclMemory(std::shared_ptr<Handle> handle, std::size_t bytes, bool symmetric,
                       const CallOptions& options)
    : handle_(std::move(handle)) {
  void* data = nullptr;
  bytes = std::max<std::size_t>(bytes, 1);
  const abi::Result result = functions().mem_alloc(&data, bytes);
  if (result != abi::kSuccess) {
    throw Error(ErrorCode::kMemory, std::to_string(bytes) +
                                        " bytes of device memory could not be allocated: " +
                                        to_error(result, "ncclMemAlloc", handle_->get()).what());
  }
  data_ = static_cast<std::byte*>(data);
  try {
    register_with(bytes, symmetric, options);
  } catch (...) {
    (void)functions().mem_free(data_);
    throw;
  }
}

void NcclMemory::register_with(std::size_t bytes, bool symmetric, const CallOptions& options) {
  const abi::Functions& f = functions();
  if (symmetric && f.window_register != nullptr) {
    // Success and a null window: this system has none.
    handle_->check(f.window_register(handle_->get(), data_, bytes, &window_, abi::kSymmetricWindow),
                   "ncclCommWindowRegister");
    handle_->settle(options, "ncclCommWindowRegister");
    if (window_ != nullptr) return;
  }
  // An optimisation: where it is refused the memory is as good as any.
  if (f.register_memory(handle_->get(), data_, bytes, &registration_) != abi::kSuccess) {
    registration_ = nullptr;
  }
  handle_->settle(options, "ncclCommRegister");
}

void NcclMemory::wait_for_device() const noexcept {
  try {
    const cuda::DeviceGuard device(handle_->device());
    const cuda::RelaxedCapture relaxed;
    (void)cudaDeviceSynchronize();
    (void)cudaGetLastError();
  } catch (...) {  // the process is ending, and the driver has gone
  }
}

NcclMemory::~NcclMemory() {
  try {
    const cuda::DeviceGuard device(handle_->device());
    const abi::Functions& f = functions();
    if (handle_->is_usable()) {
      if (window_ != nullptr) (void)f.window_deregister(handle_->get(), window_);
      if (registration_ != nullptr) (void)f.deregister_memory(handle_->get(), registration_);
    }
    (void)f.mem_free(data_);
  } catch (...) {  // the process is ending, and the driver has gone
  }
}

}  // namespace fastdist::nccl
