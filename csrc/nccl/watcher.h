// Watches a communicator's unfinished calls, since NCCL itself waits forever.
//
// Every call is entered before it is made and marked once it is enqueued. Every 20 ms a thread
// checks the oldest call (NCCL runs the calls of a communicator in order, whatever their streams),
// NCCL's asynchronous errors, and whether all ranks are alive. If a call is late, NCCL has failed
// or a rank has died, the communicator is aborted: work on the device ends, a thread inside an NCCL
// call returns, and every later call throws the reason. The thread sleeps while no call is pending.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/communicator.h"
#include "core/recorder.h"
#include "core/signature.h"
#include "cuda/driver.h"
#include "cuda/stream.h"
#include "nccl/engine.h"
#include "nccl/handle.h"

namespace fastdist::nccl {

// Reuses the events of a device: creating an event costs as much as a call.
class EventPool {
 public:
  explicit EventPool(int device) : device_(device) { free_.reserve(kMost); }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] cuda::Event take();
  void give_back(cuda::Event event) noexcept;

 private:
  static constexpr std::size_t kMost = 256;

  int device_;
  std::mutex mutex_;
  std::vector<cuda::Event> free_;
};

class EventMark final : public Mark {
 public:
  // Marks the current end of `stream`. The device must be current.
  EventMark(std::shared_ptr<EventPool> pool, StreamHandle stream, bool captured);
  ~EventMark() override { pool_->give_back(std::move(event_)); }
  [[nodiscard]] bool is_done() const override { return captured_ || event_.is_done(); }
  [[nodiscard]] bool uses_arrays() const override;
  void make_wait(StreamHandle stream) const override {
    const cuda::DeviceGuard device(pool_->device());  // `stream` may be its default stream
    event_.make_wait(stream);
  }

 private:
  std::shared_ptr<EventPool> pool_;
  cuda::Event event_;
  StreamHandle stream_;
  bool captured_;
  std::optional<cuda::CaptureId> capture_;  // that the stream was in
};

class Watcher {
 public:
  // `recorded` is the communicator's number in the recorder's file. Calls are recorded as done when
  // the thread finds them finished.
  Watcher(std::shared_ptr<Handle> handle, const Connection& connection,
          std::optional<std::uint16_t> recorded);
  ~Watcher();

  // `enter` must be called before a call is made, then `enqueued`, or `withdraw` if the call
  // failed.
  void enter(const Signature& signature, const CallOptions& options);
  void enqueued(std::shared_ptr<const Mark> mark);
  void withdraw() noexcept;
  // Waits until all calls have finished or the communicator has failed.
  void drain() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    Signature signature;
    std::chrono::nanoseconds timeout;
    Clock::time_point start;
    std::shared_ptr<const Mark> mark;  // null while a thread is making the call
    std::shared_ptr<recorder::Record> record;
  };
  // State shared with the thread. A forked child has no such thread and leaks its copy.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::condition_variable drained;
    std::deque<Call> calls;
    bool stopping = false;
    std::thread thread;
  };

  void loop();
  // Removes the calls at the front that have finished.
  void drop_done(std::unique_lock<std::mutex>& lock);
  // Removes finished calls; throws the error if something failed.
  void poll(std::unique_lock<std::mutex>& lock);

  std::shared_ptr<Handle> handle_;
  int rank_;
  Checker* checker_;  // finds ranks that have died or differ; may be null
  std::optional<std::uint16_t> recorded_;
  std::uint64_t calls_ = 0;
  int generation_ = process_generation();
  int polls_with_error_ = 0;  // in a row; used by the thread only
  std::unique_ptr<State> state_ = std::make_unique<State>();
};

}  // namespace fastdist::nccl
