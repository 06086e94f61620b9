#include "nccl/scratch.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace fastdist::nccl {
namespace {

constexpr std::size_t kSmallest = std::size_t{1} << 20;

// Rounds up to a power of two, so that slowly growing demand does not reallocate each time.
std::size_t capacity_for(std::size_t bytes) { return std::bit_ceil(std::max(bytes, kSmallest)); }

}  // namespace

std::byte* Scratch::grow(cuda::DeviceBuffer& buffer, std::size_t bytes, const CallOptions& options,
                         Checker* checker) {
  if (buffer.bytes() < bytes) {
    cuda::DeviceBuffer larger;
    std::optional<Error> failure;
    try {
      larger = cuda::DeviceBuffer(capacity_for(bytes));
    } catch (const Error& error) {
      failure = error;
    }
    agree_on_memory(capacity_for(bytes), failure, options, captured_ ? nullptr : checker);
    if (captured_) outgrown_.push_back(std::move(buffer));
    buffer = std::move(larger);
  }
  return buffer.data();
}

std::byte* Scratch::bucket(std::size_t which, std::size_t bytes,
                           const std::shared_ptr<Handle>& handle, const CallOptions& options,
                           Checker* checker) {
  Bucket& bucket = buckets_[which];
  if (captured_) return grow(bucket.plain, bytes, options, checker);
  if (bucket.bytes < bytes) {
    // The old bucket is freed first, so that only one is allocated. An event shows the end of its
    // last use: synchronizing the device would fail while another thread captures a stream.
    if (bucket.registered && free_) free_->synchronize();
    bucket.registered.reset();
    bucket.bytes = 0;
    bucket.registered = std::make_unique<NcclMemory>(handle, capacity_for(bytes), options, checker);
    bucket.bytes = capacity_for(bytes);
  }
  return bucket.registered->data();
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
