// One rank's communicator as Python holds it: with queues for calls that run later, and with what
// those calls work on.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/caller.h"
#include "bindings/work.h"
#include "core/error.h"
#include "core/work.h"
#include "host/communicator.h"

namespace fastdist::bindings {

namespace py = pybind11;
using host::HostCommunicator;

// One rank's communicator with its queues: collectives in one, each direction of each lane in one.
class Host {
 public:
  Host(std::shared_ptr<host::Machine> machine, const std::vector<int>& members, int rank,
       const std::vector<std::size_t>& offsets, std::shared_ptr<host::SharedBlock> block,
       const host::Tuning& tuning)
      : communicator_(std::move(machine), members, rank, offsets, std::move(block), tuning) {}
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  // The queues end before the communicator does; closing it makes their calls fail at once.
  ~Host() {
    communicator_.close();
    const GilRelease release;
    lanes_.clear();
  }

  [[nodiscard]] HostCommunicator& communicator() noexcept { return communicator_; }

  // Runs `call(communicator, options)` in order: now, returning `result`; or later, returning a
  // PendingCall. `kept` holds what the call reads and writes.
  template <class Call>
  py::object run(Call call, py::handle kept, py::handle result, std::chrono::nanoseconds timeout,
                 bool async) {
    return run_in(collectives_, std::move(call), kept, result, timeout, async);
  }
  // Runs the call in this thread if nothing is pending before it; false if something is.
  template <class Call>
  bool run_now(Call&& call, std::chrono::nanoseconds timeout) {
    return run_now_in(collectives_, call, timeout);
  }
  template <class Call>
  py::object run_in_lane(int peer, bool sends, Call call, py::handle kept, py::handle result,
                         std::chrono::nanoseconds timeout, bool async) {
    return run_in(lane(peer, sends), std::move(call), kept, result, timeout, async);
  }
  // The same for a caller without the GIL, whom the call works for: it waits for what is pending.
  template <class Call>
  void run_without_gil(const Call& call, const CallOptions& options) {
    if (collectives_.try_run([&] { call(communicator_, options); })) return;
    const RecordedCaller caller(options.caller->location());
    CallOptions later = options;
    later.caller = &caller;
    const auto work = collectives_.submit([&] { call(communicator_, later); });
    while (!work->wait(std::chrono::milliseconds(50))) {
      try {
        options.caller->check_interrupt();
      } catch (...) {
        communicator_.close();  // ends the call, which works on what is on this stack
        work->wait(std::chrono::hours(24 * 365));
        throw;
      }
    }
  }
  [[nodiscard]] int root(py::handle root) const {
    return to_rank(root, "root", communicator_.size());
  }
  // The other end of a lane.
  [[nodiscard]] int peer(py::handle peer, const char* argument) const {
    return to_rank(peer, argument, communicator_.size(), communicator_.rank());
  }

 private:
  WorkQueue& lane(int peer, bool sends) {
    const std::lock_guard lock(mutex_);
    return lanes_[{peer, sends}];
  }
  // Keeps what a call works on until it has ended; lets go of what earlier calls worked on.
  void keep_until_done(const PendingCall& call) {
    std::vector<std::shared_ptr<py::object>> dropped;  // may run Python code: not under the lock
    const std::lock_guard lock(mutex_);
    while (!in_flight_.empty() && in_flight_.front().first->is_done()) {
      dropped.push_back(std::move(in_flight_.front().second));
      in_flight_.pop_front();
    }
    in_flight_.emplace_back(call.work, call.kept);
  }
  template <class Call>
  bool run_now_in(WorkQueue& queue, Call& call, std::chrono::nanoseconds timeout) {
    const PythonCaller caller;
    const CallOptions options{timeout, &caller};
    return queue.try_run([&] { call(communicator_, options); });
  }
  template <class Call>
  py::object run_in(WorkQueue& queue, Call call, py::handle kept, py::handle result,
                    std::chrono::nanoseconds timeout, bool async) {
    if (!async && run_now_in(queue, call, timeout)) {
      return py::reinterpret_borrow<py::object>(result);
    }
    communicator_.check_usable();
    const auto caller = std::make_shared<RecordedCaller>(python_location());
    PendingCall pending{queue.submit([this, call = std::move(call), caller, timeout] {
                          call(communicator_, CallOptions{timeout, caller.get()});
                        }),
                        py::reinterpret_borrow<py::object>(result),
                        std::make_shared<py::object>(py::reinterpret_borrow<py::object>(kept))};
    keep_until_done(pending);
    if (async) return py::cast(std::move(pending));
    wait_interruptibly(*pending.work, std::chrono::hours(24 * 365));
    *pending.kept = py::none();
    return pending.result;
  }

  HostCommunicator communicator_;
  std::mutex mutex_;  // guards in_flight_ and the map of lanes
  std::deque<std::pair<std::shared_ptr<Work>, std::shared_ptr<py::object>>> in_flight_;
  WorkQueue collectives_;
  std::map<std::pair<int, bool>, WorkQueue> lanes_;
};

// Every collective as a builtin bound to the communicator that `owner` holds, by name.
py::dict host_calls(const py::object& owner);

}  // namespace fastdist::bindings
