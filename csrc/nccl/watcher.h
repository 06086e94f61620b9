// Watches the calls of a communicator that the device has not finished: NCCL itself waits forever.
//
// Every call is entered here before it goes to NCCL and marked when it has been enqueued. A thread
// looks at the oldest one every few milliseconds (NCCL runs the calls of a communicator in order,
// whatever their streams), at what NCCL reports of its own, and whether all ranks live. When a call
// is late, NCCL has failed or a rank has died, the communicator is given up: what runs on the
// device ends, a call that a thread is in returns, and every later call throws the reason. The
// thread sleeps while nothing is under way.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/communicator.h"
#include "core/signature.h"
#include "cuda/stream.h"
#include "nccl/engine.h"
#include "nccl/handle.h"

namespace fastdist::nccl {

// Events of a device that are used again: making one costs as much as a call.
class EventPool {
 public:
  explicit EventPool(int device) : device_(device) {}
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] cuda::Event take();
  void give_back(cuda::Event event) noexcept;

 private:
  int device_;
  std::mutex mutex_;
  std::vector<cuda::Event> free_;
};

class EventMark final : public Mark {
 public:
  // Here on `stream`; the device is current.
  EventMark(std::shared_ptr<EventPool> pool, StreamHandle stream, bool captured);
  ~EventMark() override { pool_->give_back(std::move(event_)); }
  [[nodiscard]] bool is_done() const override { return captured_ || event_.is_done(); }
  void make_wait(StreamHandle stream) const override {
    const cuda::DeviceGuard device(pool_->device());  // whose default stream may be meant
    event_.make_wait(stream);
  }

 private:
  std::shared_ptr<EventPool> pool_;
  cuda::Event event_;
  bool captured_;
};

class Watcher {
 public:
  // `checker` may be null; it knows which ranks have died.
  Watcher(std::shared_ptr<Handle> handle, int rank, const Checker* checker);
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;
  ~Watcher();

  // A call is about to be made; then it is enqueued, or has not come that far.
  void enter(const Signature& signature, const CallOptions& options);
  void enqueued(std::shared_ptr<const Mark> mark);
  void withdraw() noexcept;
  // Waits until all calls have ended or the communicator was given up.
  void drain() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    Signature signature;
    std::chrono::nanoseconds timeout;
    Clock::time_point start;
    std::shared_ptr<const Mark> mark;  // null: a thread is still in it
  };
  // What the thread shares. A forked child has no such thread, and leaves its copy alone.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::condition_variable drained;
    std::deque<Call> calls;
    bool stopping = false;
    std::thread thread;
  };

  void loop();
  // Lets go of what has ended; what is wrong, if something is.
  [[nodiscard]] std::optional<Error> look(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] Error late(const Call& call) const;

  std::shared_ptr<Handle> handle_;
  int rank_;
  const Checker* checker_;
  int generation_ = process_generation();
  std::unique_ptr<State> state_ = std::make_unique<State>();
};

}  // namespace fastdist::nccl
