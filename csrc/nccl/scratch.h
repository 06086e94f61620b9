// Device memory for a communicator's calls: buckets, data gathered from the ranks, and the
// magnitudes of a list. It grows to the size that the largest call needs. One call uses it at a
// time: a call waits for the end of the previous call, which may be on another stream.
//
// Each capture has scratch memory of its own, which its graph keeps: a graph may be replayed while
// other calls run, and cannot wait for work outside of it.
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

  // Returns bucket `which`, registered with NCCL. Registering is a collective call with `options`;
  // `checker` compares its outcome. Captured buckets are plain memory, since nothing can be
  // registered during a capture.
  [[nodiscard]] std::byte* bucket(std::size_t which, std::size_t bytes,
                                  const std::shared_ptr<Handle>& handle, const CallOptions& options,
                                  Checker* checker);
  // Growing the other memory is a collective call, too.
  [[nodiscard]] std::byte* gathered(std::size_t bytes, const CallOptions& options,
                                    Checker* checker) {
    return grow(gathered_, bytes, options, checker);
  }
  [[nodiscard]] float* magnitudes(std::size_t count, const CallOptions& options, Checker* checker) {
    return reinterpret_cast<float*>(grow(magnitudes_, count * sizeof(float), options, checker));
  }

  // Must be called before NCCL destroys the communicator, when no work uses the buckets.
  void forget_buckets() noexcept { buckets_ = {}; }

  // Must be called around each use, with the stream of the work.
  void begin(StreamHandle stream);
  void end(StreamHandle stream);

  // The side stream and events for overlapped packing.
  struct Lane {
    cuda::Stream side;  // packs and unpacks while the caller's stream transfers
    cuda::Event start;
    std::array<cuda::Event, 2> packed;
    std::array<cuda::Event, 2> moved;
    cuda::Event end;
  };
  [[nodiscard]] Lane& lane();

 private:
  struct Bucket {
    std::size_t bytes = 0;
    std::unique_ptr<NcclMemory> registered;
    cuda::DeviceBuffer plain;
  };
  // Grows a buffer on all ranks or on none. In a capture, which other ranks may not make, this rank
  // grows alone, and the old memory is kept, since earlier calls of the capture use it.
  [[nodiscard]] std::byte* grow(cuda::DeviceBuffer& buffer, std::size_t bytes,
                                const CallOptions& options, Checker* checker);

  bool captured_;
  std::array<Bucket, 2> buckets_;
  cuda::DeviceBuffer gathered_;
  cuda::DeviceBuffer magnitudes_;
  std::vector<cuda::DeviceBuffer> outgrown_;
  std::optional<Lane> lane_;
  std::optional<cuda::Event> free_;  // the end of the last use
};

}  // namespace fastdist::nccl
