// One rank's GPU communicator as Python holds it, with the arrays that its pending calls use.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/array.h"
#include "bindings/caller.h"
#include "bindings/checker.h"
#include "nccl/engine.h"

namespace fastdist::bindings {

using nccl::GpuCommunicator;

inline nccl::StreamHandle to_stream(py::handle stream) {
  void* const handle = PyLong_AsVoidPtr(stream.ptr());
  if (handle == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return static_cast<nccl::StreamHandle>(handle);
}

class Gpu;

// An asynchronous call on the communicator's own stream.
struct GpuWork {
  std::shared_ptr<Gpu> owner;
  std::shared_ptr<const nccl::Mark> mark;
  std::shared_ptr<Work> comparison;  // with the calls of the other ranks; may be null
  py::object result;
  nccl::StreamHandle from;  // the stream on which it was made
};

class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  // `checker` compares the communicator's calls; it may be null.
  Gpu(std::unique_ptr<GpuCommunicator> communicator, std::unique_ptr<HostChecker> checker)
      : communicator_(std::move(communicator)), checker_(std::move(checker)) {}
  // Waits for the device.
  ~Gpu() {
    const GilRelease release;
    communicator_.reset();
  }

  [[nodiscard]] GpuCommunicator& communicator() noexcept { return *communicator_; }

  // Enqueues `call(communicator, options)`: on `stream`, returning `result`, or if `async`, on the
  // communicator's own stream, returning a GpuWork. `kept` is a tuple of the call's arrays or lists
  // of arrays.
  py::object run(const auto& call, nccl::StreamHandle stream, std::chrono::nanoseconds timeout,
                 bool async, py::handle result, py::handle kept) {
    std::shared_ptr<const nccl::Mark> mark;
    std::shared_ptr<Work> comparison;
    {
      const PythonCaller caller(python_location());
      caller.may_block();  // never wait for another thread's call while holding the GIL
      const std::lock_guard lock(mutex_);
      telling([&] {
        CallOptions options{timeout, &caller, nullptr, nullptr, stream};
        if (async) {
          options.stream = communicator_->own_stream();
          communicator_->follow(stream);
        }
        call(*communicator_, options);
        if (!async) return;
        mark = communicator_->mark(communicator_->own_stream());
        if (checker_) comparison = checker_->last();
      });
    }
    release_finished();
    if (!async) return py::reinterpret_borrow<py::object>(result);
    keep(mark, kept);
    return py::cast(GpuWork{shared_from_this(), std::move(mark), std::move(comparison),
                            py::reinterpret_borrow<py::object>(result), stream});
  }

  // Launches all calls that `calls` makes, with the GIL, together on `stream`.
  void run_group(const std::function<void()>& calls, nccl::StreamHandle stream,
                 std::chrono::nanoseconds timeout) {
    const PythonCaller caller;
    const CallOptions options{timeout, &caller, nullptr, nullptr, stream};
    caller.may_block();
    const std::lock_guard lock(mutex_);
    telling([&] {
      communicator_->as_group(options, [&] {
        const py::gil_scoped_acquire gil;
        calls();
      });
    });
  }
  // Makes the ranks compare their calls now. Does nothing if calls are not compared.
  void hurry() {
    if (checker_) checker_->hosts().collectives().hurry();
  }
  void check_usable() {
    const GilRelease release;
    telling([this] { communicator_->check_usable(); });
  }
  // Waits for the device, and throws the error of a comparison that no call has thrown.
  void close() {
    const GilRelease release;
    communicator_->close();
    if (checker_) checker_->hosts().throw_untold();
  }

  // Keeps the arrays of a tuple until the call with this `mark` has finished, or until `release`:
  // their library does not know about the communicator's stream and would reuse their memory.
  void keep(std::shared_ptr<const nccl::Mark> mark, py::handle arrays) {
    py::list items;
    for (const py::handle each : arrays) {
      const bool is_list = PyList_Check(each.ptr()) != 0;  // which the caller may change
      items.append(is_list ? py::reinterpret_steal<py::object>(PyList_AsTuple(each.ptr()))
                           : py::reinterpret_borrow<py::object>(each));
    }
    const std::lock_guard lock(kept_mutex_);
    kept_.emplace_back(std::move(mark), std::move(items));
  }
  // Does the same for the last call, which ran on a stream that the arrays' library does not know.
  void keep_for_last(const py::object& stream, const py::tuple& arrays) {
    const nccl::StreamHandle used = to_stream(stream);
    std::shared_ptr<const nccl::Mark> mark;
    {
      const GilRelease release;
      const std::lock_guard lock(mutex_);
      mark = communicator_->mark(used);
    }
    keep(std::move(mark), arrays);
  }
  // Releases the arrays of a call, once the stream that uses them next waits for the call.
  void release(const nccl::Mark* mark) {
    py::object dropped;  // destroyed after the lock: destruction may run Python code
    const std::lock_guard lock(kept_mutex_);
    const auto found = std::find_if(kept_.begin(), kept_.end(),
                                    [mark](const Kept& each) { return each.first.get() == mark; });
    if (found == kept_.end()) return;
    dropped = std::move(found->second);
    kept_.erase(found);
  }
  void release_finished() {
    std::vector<py::object> dropped;
    const std::lock_guard lock(kept_mutex_);
    while (!kept_.empty() && !uses_arrays(*kept_.front().first)) {
      dropped.push_back(std::move(kept_.front().second));
      kept_.pop_front();
    }
  }

  // Returns true while the arrays' memory must not be reused.
  [[nodiscard]] static bool uses_arrays(const nccl::Mark& mark) {
    try {
      return mark.uses_arrays();
    } catch (const Error&) {
      return false;
    }
  }

  // Returns true if the call has finished. A failed device counts as having finished all calls.
  [[nodiscard]] static bool is_over(const nccl::Mark& mark) {
    try {
      return mark.is_done();
    } catch (const Error&) {
      return true;
    }
  }

 private:
  // Calls `call`. Its error may be the consequence of a mismatch, which is then thrown instead.
  void telling(const auto& call) {
    constexpr std::chrono::seconds kUntilCompared{1};
    try {
      call();
    } catch (const Error& error) {
      const ErrorCode code = error.code();
      const bool is_of_arguments = code == ErrorCode::kType || code == ErrorCode::kValue;
      if (!checker_ || is_of_arguments) throw;
      if (code == ErrorCode::kPeerFailure || code == ErrorCode::kState ||
          code == ErrorCode::kSystem) {
        (void)checker_->settle(kUntilCompared);
      }
      checker_->hosts().told();  // by this error, which may be that of a comparison
      communicator_->check_usable();
      throw;
    }
  }

  std::unique_ptr<GpuCommunicator> communicator_;
  std::unique_ptr<HostChecker> checker_;
  std::recursive_mutex mutex_;  // one call, or group of calls, at a time
  using Kept = std::pair<std::shared_ptr<const nccl::Mark>, py::object>;
  std::mutex kept_mutex_;  // guards kept_; no Python code runs while it is held
  std::deque<Kept> kept_;
};

}  // namespace fastdist::bindings
