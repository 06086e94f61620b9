// One rank's communicator on host memory as Python holds it, with queues of pending calls and the
// arrays that they use.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/caller.h"
#include "core/communicator.h"
#include "core/error.h"
#include "core/inbox.h"
#include "core/recorder.h"
#include "core/work.h"

namespace fastdist::bindings {

// A queued call. Its arrays stay alive until it has ended, even if this object is dropped.
struct PendingCall {
  std::shared_ptr<Work> work;
  py::object result;
  // Shared with the communicator. Emptied by the first thread that sees that the call has ended.
  std::shared_ptr<py::object> kept;
  py::object owner;  // the communicator
};

// Waits for a call in slices, so that Ctrl-C is handled. Needs the GIL and releases it. Returns
// false if `timeout` passes first.
bool wait_interruptibly(Work& work,
                        std::chrono::nanoseconds timeout = std::chrono::hours(24 * 365));

// Throws the error of a wait that has ended before its call.
[[noreturn]] void throw_unfinished(py::handle timeout);

// A communicator with one queue for collectives, queues of messages, and an inbox for each rank.
class Endpoint {
 public:
  // Calls in order, and their number so far.
  struct Queue : WorkQueue {
    std::uint64_t calls = 0;
  };

  explicit Endpoint(std::shared_ptr<BlockingCommunicator> communicator)
      : owner_(std::move(communicator)), communicator_(*owner_) {
    for (int p = 0; p < communicator_.size(); ++p) {
      inboxes_.push_back(std::make_unique<Inbox>(communicator_, p));
    }
  }
  // The queues end before the communicator. Closing it makes pending calls fail immediately.
  virtual ~Endpoint() {
    communicator_.close();
    const GilRelease release;
    lanes_.clear();
    if (recorded_) recorder::close_communicator(*recorded_);
  }

  // Records the calls from now on; see `recorder::open_communicator`.
  void record(std::uint64_t key, const std::string& engine) {
    if (recorded_) return;
    recorded_ =
        recorder::open_communicator(communicator_.rank(), communicator_.size(), key, engine);
  }

  [[nodiscard]] BlockingCommunicator& communicator() noexcept { return communicator_; }

  [[nodiscard]] Inbox& inbox(int src) { return *inboxes_.at(static_cast<std::size_t>(src)); }

  // The queue of collectives, and a queue of messages to a rank or from it.
  [[nodiscard]] Queue& collectives() noexcept { return collectives_; }
  [[nodiscard]] Queue& lane(int peer, bool sends) {
    const std::lock_guard lock(mutex_);
    return lanes_[{peer, sends}];
  }
  // Runs `call(communicator, options)` in the queue's thread, in order.
  std::shared_ptr<Work> submit(Queue& queue, auto call, std::chrono::nanoseconds timeout,
                               bool async) {
    communicator_.check_usable();
    refuse_beside_another(queue);
    const auto caller = std::make_shared<RecordedCaller>();
    auto task = [this, &queue, call = std::move(call), caller, timeout] {
      CallOptions options{timeout, caller.get()};
      make(queue, call, options);
    };
    // A caller that waits does nothing else, so its call is not counted.
    return async ? queue.submit(counted(std::move(task))) : queue.submit(std::move(task));
  }
  // Runs such a call in this thread if the queue is empty; otherwise returns false.
  bool run_now(Queue& queue, const auto& call, std::chrono::nanoseconds timeout) {
    const PythonCaller caller;
    CallOptions options{timeout, &caller};
    bool is_done = false;
    caller.run([&] { is_done = queue.try_run([&] { make(queue, call, options); }); });
    return is_done;
  }
  // Does the same for a caller that does not hold the GIL. Waits for pending calls.
  void run_without_gil(const auto& call, CallOptions options) {
    if (collectives_.try_run([&] { make(collectives_, call, options); })) return;
    refuse_beside_another(collectives_);
    const RecordedCaller caller(*options.caller);
    CallOptions later = options;
    later.caller = &caller;
    wait_without_gil(*collectives_.submit([&] { make(collectives_, call, later); }), options);
  }
  // Makes a receive, which needs no order, in this thread.
  void receive_here(const auto& call, Inbox& inbox, std::chrono::nanoseconds timeout) {
    const PythonCaller caller;
    caller.run([&] {
      CallOptions options{timeout, &caller};
      record_while([&] { return inbox.next_number(); }, options, [&] { call(options); });
    });
  }
  // Runs `call(communicator, options)` soon, in order with the other calls, for a caller that does
  // not hold the GIL and does not wait, unless it is far ahead. The call handles its own errors.
  std::shared_ptr<Work> run_soon(auto call, const CallOptions& options) {
    constexpr std::size_t kMostAhead = 64;
    refuse_beside_another(collectives_);
    auto work = collectives_.submit_soon(counted(
        [this, call = std::move(call), caller = std::make_shared<RecordedCaller>(*options.caller),
         timeout = options.timeout] { call(communicator_, CallOptions{timeout, caller.get()}); }));
    if (const auto oldest = collectives_.before(kMostAhead)) wait_without_gil(*oldest, options);
    return work;
  }

  // Waits until the pending collectives and sends have ended, successfully or not. Receives, for
  // which a message may never come, are not waited for.
  void finish() {
    std::vector<Queue*> queues{&collectives_};
    {
      const std::lock_guard lock(mutex_);
      for (auto& [peer_and_sends, queue] : lanes_) {
        if (peer_and_sends.second) queues.push_back(&queue);
      }
    }
    for (Queue* const queue : queues) {
      if (const auto last = queue->last()) wait_interruptibly(*last);
    }
  }
  // Returns the call of `work`, whose arrays are kept until it has ended. Releases the arrays of
  // ended calls.
  PendingCall pending(std::shared_ptr<Work> work, py::handle kept, py::handle result) {
    PendingCall call{std::move(work), py::reinterpret_borrow<py::object>(result),
                     std::make_shared<py::object>(py::reinterpret_borrow<py::object>(kept)),
                     py::cast(this, py::return_value_policy::reference)};
    std::vector<std::shared_ptr<py::object>> dropped;  // destroyed after the lock: may run Python
    const std::lock_guard lock(mutex_);
    if (in_flight_.size() >= sweep_at_) {
      std::erase_if(in_flight_, [&](auto& kept) {
        const bool is_done = kept.first->is_done();
        if (is_done) dropped.push_back(std::move(kept.second));
        return is_done;
      });
      sweep_at_ = 2 * in_flight_.size() + 1;
    }
    in_flight_.emplace_back(call.work, call.kept);
    return call;
  }

  // Makes the next call throw `failure`, which was found after the failed call had returned.
  void tell_next(const Error& failure) {
    const std::lock_guard lock(mutex_);
    untold_ = failure;
    is_told_ = false;
  }
  // Throws that failure, if the caller does not know of it yet.
  void throw_untold() {
    if (is_told_.load(std::memory_order_acquire) || is_told_.exchange(true)) return;
    const std::lock_guard lock(mutex_);
    throw Error(*untold_);
  }
  // The caller knows of that failure now.
  void told() noexcept { is_told_ = true; }
  // Also calls `function` with the error whenever ranks have called different collectives.
  void on_mismatch(std::function<void(const Error&)> function) {
    const std::lock_guard lock(mutex_);
    on_mismatch_.push_back(std::move(function));
  }

 private:
  // Throws if the queue runs another call that its caller waits for. Sends and receives of several
  // threads have tags.
  void refuse_beside_another(const Queue& queue) const {
    if (queue.is_running_here()) {
      throw Error(ErrorCode::kState,
                  "a signal handler called a collective while its thread waits in another one of "
                  "the same communicator, which must end first; set a flag in the handler and call "
                  "the collective later");
    }
    if (&queue == &collectives_ && queue.is_running_elsewhere()) {
      throw Error(ErrorCode::kState,
                  "two threads called collectives of one communicator at once, so that other ranks "
                  "may call them in another order; give each thread a communicator of its own, by "
                  "split");
    }
  }
  // Makes a call when it is its turn. Sends and receives, which have queues of their own, concern
  // two ranks, so other calls continue after their mismatch.
  void make(Queue& queue, const auto& call, CallOptions& options) {
    const auto next = [&queue] { return ++queue.calls; };
    record_while(next, options, [&] {
      if (&queue != &collectives_) return call(communicator_, options);
      throw_untold();
      try {
        call(communicator_, options);
      } catch (const Error& error) {
        if (error.code() == ErrorCode::kMismatch) report_mismatch(error, options);
        throw;
      }
    });
  }
  // Makes a call that is recorded, if calls are, under the number that `next` returns.
  void record_while(const auto& next, CallOptions& options, const auto& call) {
    recorder::File* const file = recorded_ ? recorder::file.load() : nullptr;
    if (file == nullptr) return call();
    recorder::Record record(*file, *recorded_, next(), options.caller->site());
    options.record = &record;
    call();
    record.succeed();
  }
  void report_mismatch(const Error& error, const CallOptions& options) {
    options.caller->may_block();
    std::vector<std::function<void(const Error&)>> functions;
    {
      const std::lock_guard lock(mutex_);
      functions = on_mismatch_;
    }
    for (const auto& function : functions) function(error);
  }
  void wait_without_gil(Work& work, const CallOptions& options) {
    while (!work.wait(std::chrono::milliseconds(50))) {
      try {
        options.caller->check_interrupt();
      } catch (...) {
        communicator_.close();  // ends the call, which may use the waiting function's stack
        work.wait(std::chrono::hours(24 * 365));
        throw;
      }
    }
  }
  // Returns a task that counts as submitted until it has ended.
  auto counted(auto task) {
    communicator_.count_submitted(1);
    std::shared_ptr<BlockingCommunicator> count(
        &communicator_, [](BlockingCommunicator* each) { each->count_submitted(-1); });
    return [count = std::move(count), task = std::move(task)]() mutable {
      const auto until_end = std::move(count);
      task();
    };
  }

  std::shared_ptr<BlockingCommunicator> owner_;
  BlockingCommunicator& communicator_;
  std::mutex mutex_;  // guards in_flight_, sweep_at_, lanes_, untold_ and on_mismatch_
  std::optional<Error> untold_;
  std::atomic<bool> is_told_{true};
  std::vector<std::function<void(const Error&)>> on_mismatch_;
  std::vector<std::pair<std::shared_ptr<Work>, std::shared_ptr<py::object>>> in_flight_;
  std::size_t sweep_at_ = 1;  // ended calls are released when in_flight_ has this many
  Queue collectives_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;
  std::map<std::pair<int, bool>, Queue> lanes_;
  std::optional<std::uint16_t> recorded_;  // the number in the recorder's file
};

// --- receives, which are matched with messages by their tags ------------------------------------

inline constexpr int kAnyRank = -1;

// The messages that a call wants, one for each array.
struct Wanted {
  TensorViews out;
  int src;  // or kAnyRank, for one array
  std::uint64_t tag;
  Fit fit;
  std::chrono::nanoseconds timeout;
};

// Receives, and returns `result`; if that is null, the Receive, which has the message's source.
py::object receive(Endpoint& endpoint, const Wanted& wanted, const py::object& result);
// Begins to receive, and returns a PendingCall of the same. `kept` holds the arrays.
py::object receive_later(Endpoint& endpoint, const Wanted& wanted, const py::object& result,
                         const py::object& kept);

}  // namespace fastdist::bindings
