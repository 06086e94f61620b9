// Memory allocated by NCCL and registered with it: as a symmetric window if every rank gets one,
// otherwise as a buffer if that succeeds. Each allocation has one registration, from its start,
// since several windows of one allocation have corrupted data in some NCCL versions.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/stream.h"
#include "nccl/engine.h"
#include "nccl/handle.h"

namespace fastdist::nccl {

class NcclMemory : NonCopyable {
 public:
  // Every rank must call. The device must be current. `checker` may be null: then all ranks must
  // get a window, or none.
  NcclMemory(std::shared_ptr<Handle> handle, std::size_t bytes, const CallOptions& options,
             Checker* checker);
  ~NcclMemory();

  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  // Waits until no enqueued work can use the memory.
  void wait_for_device() const noexcept;

 private:
  // Returns true if the memory is a window now.
  [[nodiscard]] bool make_window(std::size_t bytes, const CallOptions& options, Checker* checker);

  std::shared_ptr<Handle> handle_;
  std::shared_ptr<std::byte> data_;  // the handle also holds it, until NCCL has ended
  abi::Window window_ = nullptr;
  void* registration_ = nullptr;
};

// The buckets of a communicator's calls, which grow to the size that the largest call needs. One
// call uses them at a time: a call waits for the end of the previous call, which may be on another
// stream.
//
// Each capture has scratch memory of its own, until the communicator ends: its graph may be
// replayed while other calls run, and cannot wait for work outside of it.
class Scratch {
 public:
  explicit Scratch(bool captured) : captured_(captured) {}

  // Returns bucket `which`, registered with NCCL. Registering is a collective call with `options`;
  // `checker` compares its outcome. Captured buckets are plain memory, since nothing can be
  // registered during a capture.
  [[nodiscard]] std::byte* bucket(std::size_t which, std::size_t bytes,
                                  const std::shared_ptr<Handle>& handle, const CallOptions& options,
                                  Checker* checker);

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

  bool captured_;
  std::array<Bucket, 2> buckets_;
  std::vector<cuda::DeviceBuffer> outgrown_;  // earlier calls of the capture use them
  std::optional<Lane> lane_;
  std::optional<cuda::Event> free_;  // the end of the last use
};

}  // namespace fastdist::nccl
