// Owners of streams, events and device memory.
#pragma once

#include <cstddef>
#include <memory>

#include "core/noncopyable.h"

struct CUstream_st;
struct CUevent_st;

namespace fastdist::cuda {

// A CUDA stream, not owned; null is the legacy default stream.
using StreamHandle = CUstream_st*;

// Makes a device current in this thread permanently, for threads that fastdist has started.
void make_current(int device);

// Makes a device current for its lifetime. Returning to the previous device does not initialize it:
// a context takes hundreds of megabytes of a GPU that the process may never use.
class DeviceGuard : NonCopyable {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();

 private:
  bool is_pushed_;
};

// Allows this thread to allocate memory while a stream is being captured.
class RelaxedCapture : NonCopyable {
 public:
  RelaxedCapture();
  ~RelaxedCapture();

 private:
  int previous_;
};

// Destroys events and streams, and frees memory.
struct Destroy {
  void operator()(CUevent_st* event) const noexcept;
  void operator()(StreamHandle stream) const noexcept;
  // Waits for the device; no enqueued work may use the memory afterwards.
  void operator()(std::byte* memory) const noexcept;
};

// A point in a stream, on the device that was current at construction.
class Event {
 public:
  Event();

  void record(StreamHandle stream) const;
  // Makes later work on `stream` wait for this point.
  void make_wait(StreamHandle stream) const;
  [[nodiscard]] bool is_done() const;
  // Blocks the host.
  void synchronize() const;

 private:
  std::unique_ptr<CUevent_st, Destroy> event_;
};

// A stream of the device that was current at construction; it does not wait for the default stream.
class Stream {
 public:
  Stream();
  [[nodiscard]] StreamHandle get() const noexcept { return stream_.get(); }

 private:
  std::unique_ptr<CUstream_st, Destroy> stream_;
};

// Owns memory of the device that was current at construction.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes);

  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }

 private:
  std::unique_ptr<std::byte, Destroy> data_;
};

}  // namespace fastdist::cuda
