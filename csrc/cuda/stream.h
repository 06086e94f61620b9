// Owners of streams and events.
#pragma once

#include <chrono>
#include <utility>

struct CUstream_st;
struct CUevent_st;

namespace fastdist::cuda {

// A stream of anybody's, not owned; null is the legacy default stream.
using StreamHandle = CUstream_st*;

// Makes a device current in this thread for good: one that we started. To make the one before
// current again would take memory of that one, which the process may not use.
void make_current(int device);

// Makes a device current for a while.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  static constexpr int kNothing = -1;  // to be restored
  int previous_;
};

// Allows memory to be allocated in this thread while a stream of it is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

 private:
  int previous_;
};

[[nodiscard]] bool is_capturing(StreamHandle stream);

// A point in a stream; of the device that was current when it was made.
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
  // Work enqueued on `stream` from now on starts after this point.
  void make_wait(StreamHandle stream) const;
  [[nodiscard]] bool is_done() const;
  // The host waits.
  void synchronize() const;

 private:
  CUevent_st* event_ = nullptr;
};

// A stream of the device that was current when it was made; it does not wait for the default one.
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
