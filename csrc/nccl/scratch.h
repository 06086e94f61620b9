// Device memory that a communicator's calls work in: buckets, what is gathered from the ranks, the
// magnitudes of a list. It grows to what the largest call needs and is used by one call at a time:
// a call waits for the end of the one before, which may be on another stream.
//
// Calls that are captured into a graph have a scratch of their own: a graph may be replayed while
// other calls run, and cannot be made to wait for what is outside of it.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/buffer.h"
#include "cuda/stream.h"
#include "nccl/memory.h"

namespace fastdist::nccl {

class Scratch {
 public:
  explicit Scratch(bool captured) : captured_(captured) {}

  // Buckets are known to NCCL; `options` for the collective call that this takes. Captured ones
  // are plain memory: nothing can be registered during a capture.
  [[nodiscard]] std::byte* bucket(std::size_t which, std::size_t bytes,
                                  const std::shared_ptr<Handle>& handle,
                                  const CallOptions& options);
  [[nodiscard]] std::byte* gathered(std::size_t bytes) { return grow(gathered_, bytes); }
  [[nodiscard]] float* magnitudes(std::size_t count) {
    return reinterpret_cast<float*>(grow(magnitudes_, count * sizeof(float)));
  }
  [[nodiscard]] bool is_captured() const noexcept { return captured_; }

  // While NCCL knows the communicator still, to which they are registered. Nothing is at them.
  void forget_buckets() noexcept { buckets_ = {}; }

  // Around each use, on the stream that the work goes to.
  void begin(StreamHandle stream);
  void end(StreamHandle stream);

  // What overlapped calls need.
  struct Lane {
    cuda::Stream side;  // packs and unpacks, while the caller's stream transfers
    cuda::Event start;
    std::array<cuda::Event, 2> packed;
    std::array<cuda::Event, 2> moved;
    cuda::Event end;
  };
  [[nodiscard]] Lane& lane();

 private:
  struct Bucket {
    std::size_t bytes = 0;
    std::unique_ptr<NcclMemory> known;
    cuda::DeviceBuffer plain;
  };
  // What a captured graph refers to must stay: it is kept until the communicator goes.
  [[nodiscard]] std::byte* grow(cuda::DeviceBuffer& buffer, std::size_t bytes);

  bool captured_;
  std::array<Bucket, 2> buckets_;
  cuda::DeviceBuffer gathered_;
  cuda::DeviceBuffer magnitudes_;
  std::vector<cuda::DeviceBuffer> outgrown_;
  std::optional<Lane> lane_;
  std::optional<cuda::Event> free_;  // the end of the last use
};

}  // namespace fastdist::nccl
