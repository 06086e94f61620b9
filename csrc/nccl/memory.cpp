#include "nccl/memory.h"

#include <algorithm>
#include <string>

#include "cuda/check.h"

namespace fastdist::nccl {
namespace {

void release(std::byte* memory, int device) noexcept {
  try {
    const cuda::DeviceGuard guard(device);
    const cuda::RelaxedCapture relaxed;
    (void)functions().mem_free(memory);
  } catch (...) {  // the process is exiting, and the driver is gone
  }
}

}  // namespace

NcclMemory::NcclMemory(std::shared_ptr<Handle> handle, std::size_t bytes,
                       const CallOptions& options)
    : handle_(std::move(handle)) {
  const cuda::RelaxedCapture relaxed;  // NCCL allocates memory and synchronizes
  void* data = nullptr;
  bytes = std::max<std::size_t>(bytes, 1);
  const abi::Result result = functions().mem_alloc(&data, bytes);
  if (result != abi::kSuccess) {
    throw Error(ErrorCode::kMemory, std::to_string(bytes) +
                                        " bytes of device memory could not be allocated: " +
                                        to_error(result, "ncclMemAlloc", handle_->get()).what());
  }
  const int device = handle_->device();
  data_ = {static_cast<std::byte*>(data), [device](std::byte* memory) { release(memory, device); }};
  handle_->hold_until_end(data_);
  register_with(bytes, options);
}

void NcclMemory::register_with(std::size_t bytes, const CallOptions& options) {
  const abi::Functions& f = functions();
  if (f.window_register != nullptr) {
    // Success with a null window means that this system does not support windows.
    handle_->check(
        f.window_register(handle_->get(), data_.get(), bytes, &window_, abi::kSymmetricWindow),
        "ncclCommWindowRegister");
    handle_->settle(options, "ncclCommWindowRegister");
    if (window_ != nullptr) return;
  }
  // Registration is an optimization: if it fails, the memory is used unregistered.
  if (f.register_memory(handle_->get(), data_.get(), bytes, &registration_) != abi::kSuccess) {
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
  } catch (...) {  // the process is exiting, and the driver is gone
  }
}

NcclMemory::~NcclMemory() {
  if (!handle_->is_usable()) return;  // NCCL has ended or releases its registrations as it ends
  try {
    const cuda::DeviceGuard device(handle_->device());
    const cuda::RelaxedCapture relaxed;
    const abi::Functions& f = functions();
    if (window_ != nullptr) (void)f.window_deregister(handle_->get(), window_);
    if (registration_ != nullptr) (void)f.deregister_memory(handle_->get(), registration_);
  } catch (...) {  // the process is exiting, and the driver is gone
  }
}

}  // namespace fastdist::nccl
