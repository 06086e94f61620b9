#include "nccl/scratch.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace fastdist::nccl {
namespace {

constexpr std::size_t kSmallest = std::size_t{1} << 20;

// In powers of two, so that a slowly growing demand does not allocate again and again.
std::size_t capacity_for(std::size_t bytes) { return std::bit_ceil(std::max(bytes, kSmallest)); }

}  // namespace

std::byte* Scratch::grow(cuda::DeviceBuffer& buffer, std::size_t bytes) {
  if (buffer.bytes() < bytes) {
    cuda::DeviceBuffer larger(capacity_for(bytes));
    if (captured_) outgrown_.push_back(std::move(buffer));
    buffer = std::move(larger);
  }
  return buffer.data();
}

std::byte* Scratch::bucket(std::size_t which, std::size_t bytes,
                           const std::shared_ptr<Handle>& handle, const CallOptions& options) {
  Bucket& bucket = buckets_[which];
  if (captured_) return grow(bucket.plain, bytes);
  if (bucket.bytes < bytes) {
    // Before the next one is there: the largest that are needed, once. Nothing may be at it still;
    // the whole device cannot be waited for where another thread captures one of its streams.
    if (bucket.known && free_) free_->synchronize();
    bucket.known.reset();
    bucket.bytes = 0;
    bucket.known = std::make_unique<NcclMemory>(handle, capacity_for(bytes), options);
    bucket.bytes = capacity_for(bytes);
  }
  return bucket.known->data();
}

// Also on the same stream: a handle may be that of a new stream, in place of one that has gone.
void Scratch::begin(StreamHandle stream) {
  if (!captured_ && free_) free_->make_wait(stream);
}

void Scratch::end(StreamHandle stream) {
  if (captured_) return;
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
