// Owners of streams and events.
#pragma once

#include <utility>

struct CUstream_st;
struct CUevent_st;

namespace fastdist::cuda {

// A CUDA stream, not owned; null is the legacy default stream.
using StreamHandle = CUstream_st*;

// Makes a device current in this thread permanently, for threads that fastdist has started.
void make_current(int device);

// Makes a device current for its lifetime. Returning to the previous device does not initialize it:
// a context takes hundreds of megabytes of a GPU that the process may never use.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  bool is_pushed_;
};

// Allows this thread to allocate memory while a stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

 private:
  int previous_;
};

// A point in a stream, on the device that was current at construction.
class Event {
 public:
  Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event();

  void record(StreamHandle stream) const;
  // Makes later work on `stream` wait for this point.
  void make_wait(StreamHandle stream) const;
  [[nodiscard]] bool is_done() const;
  // Blocks the host.
  void synchronize() const;

 private:
  CUevent_st* event_ = nullptr;
};

// A stream of the device that was current at construction; it does not wait for the default stream.
class Stream {
 public:
  Stream();
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~Stream();

  [[nodiscard]] StreamHandle get() const noexcept { return stream_; }

 private:
  StreamHandle stream_ = nullptr;
};

}  // namespace fastdist::cuda
