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

void agree_on_memory(std::size_t bytes, const std::optional<Error>& failure,
                     const CallOptions& options, Checker* checker) {
  const Signature question{.op = Op::kEmpty, .count = bytes, .on_gpu = true};
  const bool all_have = checker == nullptr || checker->agree(question, !failure, options);
  if (!failure && all_have) return;
  const std::string problem =
      std::to_string(bytes) + " bytes of device memory could not be allocated";
  throw Error(ErrorCode::kMemory,
              failure ? problem + ": " + failure->what() : problem + " on another rank");
}

Registration::Registration(std::shared_ptr<Handle> handle, std::byte* data, std::size_t bytes,
                           const CallOptions& options)
    : handle_(std::move(handle)) {
  const cuda::RelaxedCapture relaxed;
  handle_->check(functions().register_memory(handle_->get(), data, bytes, &registration_),
                 "ncclCommRegister");
  handle_->settle(options, "ncclCommRegister");
}

Registration::~Registration() {
  if (!handle_->is_usable()) return;  // NCCL has ended or releases its registrations as it ends
  try {
    const cuda::DeviceGuard device(handle_->device());
    const cuda::RelaxedCapture relaxed;
    (void)functions().deregister_memory(handle_->get(), registration_);
  } catch (...) {  // the process is exiting, and the driver is gone
  }
}

NcclMemory::NcclMemory(std::shared_ptr<Handle> handle, std::size_t bytes,
                       const CallOptions& options, Checker* checker)
    : handle_(std::move(handle)) {
  const cuda::RelaxedCapture relaxed;  // NCCL allocates memory and synchronizes
  void* data = nullptr;
  bytes = std::max<std::size_t>(bytes, 1);
  const abi::Result result = functions().mem_alloc(&data, bytes);
  std::optional<Error> failure;
  if (result != abi::kSuccess) {
    failure = to_error(result, "ncclMemAlloc", handle_->get());
  } else {
    const int device = handle_->device();
    data_ = {static_cast<std::byte*>(data),
             [device](std::byte* memory) { release(memory, device); }};
  }
  // All ranks must have made the same calls before NCCL waits for all of them to make a window.
  agree_on_memory(bytes, failure, options, checker);
  handle_->hold_until_end(data_);
  if (make_window(bytes, options, checker)) return;
  try {
    registration_.emplace(handle_, data_.get(), bytes, options);
  } catch (const Error&) {
    handle_->check_usable();  // registration only saves time: use the memory without it
  }
}

// NCCL's algorithm depends on whether memory is a window, so all ranks must have one, or none.
bool NcclMemory::make_window(std::size_t bytes, const CallOptions& options, Checker* checker) {
  const abi::Functions& f = functions();
  if (f.window_register == nullptr || !handle_->has_windows()) return false;
  const abi::Result result =
      f.window_register(handle_->get(), data_.get(), bytes, &window_, abi::kSymmetricWindow);
  if (result == abi::kSuccess || result == abi::kInProgress) {
    handle_->settle(options, "ncclCommWindowRegister");
  } else {
    handle_->check_usable();
    window_ = nullptr;  // refused, which is no failure
  }
  // Success with a null window means that this system does not support windows.
  const bool is_window = window_ != nullptr;
  const Signature question{.op = Op::kEmpty, .count = bytes, .on_gpu = true};
  if (checker == nullptr ? is_window : checker->agree(question, is_window, options)) return true;
  if (is_window) (void)f.window_deregister(handle_->get(), window_);
  window_ = nullptr;
  handle_->note_no_windows();
  return false;
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
    if (window_ != nullptr) (void)functions().window_deregister(handle_->get(), window_);
  } catch (...) {  // the process is exiting, and the driver is gone
  }
}

}  // namespace fastdist::nccl
