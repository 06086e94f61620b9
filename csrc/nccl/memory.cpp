#include "nccl/memory.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "cuda/check.h"

namespace fastdist::nccl {
namespace {

void try_on(int device, const auto& call) noexcept {
  try {
    const cuda::DeviceGuard guard(device);
    const cuda::RelaxedCapture relaxed;
    call();
  } catch (...) {  // the process is exiting, and the driver is gone
  }
}

// Returns true if `flag` is set on every rank, all of which must call; without a checker, on this
// one.
bool agree(std::size_t bytes, bool flag, const CallOptions& options, Checker* checker) {
  const Signature question{.op = Op::kEmpty, .count = bytes, .on_gpu = true};
  return checker == nullptr ? flag : checker->agree(question, flag, options);
}

}  // namespace

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
    data_ = {static_cast<std::byte*>(data), [device = handle_->device()](std::byte* memory) {
               try_on(device, [memory] { (void)functions().mem_free(memory); });
             }};
  }
  // All ranks must have made the same calls before NCCL waits for all of them to make a window.
  if (!agree(bytes, !failure, options, checker)) {
    refuse(ErrorCode::kMemory, bytes, " bytes of device memory could not be allocated",
           failure ? ": " : " on another rank", failure ? failure->what() : "");
  }
  handle_->hold_until_end(data_);
  if (make_window(bytes, options, checker)) return;
  const abi::Result registered =
      functions().register_memory(handle_->get(), data_.get(), bytes, &registration_);
  if (registered == abi::kSuccess) return;
  registration_ = nullptr;
  handle_->check_usable();  // registration only saves time: use the memory without it
}

// NCCL's algorithm depends on whether memory is a window, so all ranks must have one, or none.
bool NcclMemory::make_window(std::size_t bytes, const CallOptions& options, Checker* checker) {
  const abi::Functions& f = functions();
  if (f.window_register == nullptr || !handle_->has_windows()) return false;
  const abi::Result result =
      f.window_register(handle_->get(), data_.get(), bytes, &window_, abi::kSymmetricWindow);
  if (result != abi::kSuccess) {
    handle_->check_usable();
    window_ = nullptr;  // refused, which is no failure
  }
  // Success with a null window means that this system does not support windows.
  const bool is_window = window_ != nullptr;
  if (agree(bytes, is_window, options, checker)) return true;
  if (is_window) (void)f.window_deregister(handle_->get(), window_);
  window_ = nullptr;
  handle_->note_no_windows();
  return false;
}

void NcclMemory::wait_for_device() const noexcept {
  try_on(handle_->device(), [] {
    (void)cudaDeviceSynchronize();
    (void)cudaGetLastError();
  });
}

NcclMemory::~NcclMemory() {
  // NCCL releases its registrations as it ends.
  if (!handle_->is_usable()) return;
  try_on(handle_->device(), [this] {
    const abi::Functions& f = functions();
    if (window_ != nullptr) (void)f.window_deregister(handle_->get(), window_);
    if (registration_ != nullptr) (void)f.deregister_memory(handle_->get(), registration_);
  });
}

// --- the memory of a communicator's calls -------------------------------------------------------

namespace {

constexpr std::size_t kSmallest = std::size_t{1} << 20;

// Rounds up to a power of two, so that slowly growing demand does not reallocate each time.
std::size_t capacity_for(std::size_t bytes) { return std::bit_ceil(std::max(bytes, kSmallest)); }

}  // namespace

std::byte* Scratch::bucket(std::size_t which, std::size_t bytes,
                           const std::shared_ptr<Handle>& handle, const CallOptions& options,
                           Checker* checker) {
  Bucket& bucket = buckets_[which];
  if (bucket.bytes < bytes && captured_) {
    outgrown_.push_back(std::exchange(bucket.plain, cuda::DeviceBuffer(capacity_for(bytes))));
    bucket.bytes = capacity_for(bytes);
  } else if (bucket.bytes < bytes) {
    // The old bucket is freed first, so that only one is allocated. An event shows the end of its
    // last use: synchronizing the device would fail while another thread captures a stream.
    if (bucket.registered && free_) free_->synchronize();
    bucket.registered.reset();
    bucket.bytes = 0;
    bucket.registered = std::make_unique<NcclMemory>(handle, capacity_for(bytes), options, checker);
    bucket.bytes = capacity_for(bytes);
  }
  return captured_ ? bucket.plain.data() : bucket.registered->data();
}

// Waits even on the same stream handle: it may belong to a new stream after the old one was
// destroyed.
void Scratch::begin(StreamHandle stream) {
  if (free_) free_->make_wait(stream);
}

void Scratch::end(StreamHandle stream) {
  if (!free_) free_.emplace();
  free_->record(stream);
}

Scratch::Lane& Scratch::lane() {
  if (!lane_) {
    const cuda::RelaxedCapture relaxed;
    lane_.emplace();
  }
  return *lane_;
}

}  // namespace fastdist::nccl
