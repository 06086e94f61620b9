// Messages with tags, from a named rank or from any.

#include <pybind11/pybind11.h>

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/array.h"
#include "bindings/bind.h"
#include "bindings/endpoint.h"
#include "bindings/fast_call.h"
#include "core/error.h"
#include "core/inbox.h"

namespace fastdist::bindings {
namespace {

using Timeout = std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;
using Received = std::shared_ptr<Receive>;

constexpr int kAnyRank = -1;
constexpr std::chrono::microseconds kShortestPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};

}  // namespace

// The messages of one rank: an inbox for each rank, and queues of the receives that wait.
class Messages {
 public:
  explicit Messages(py::object endpoint)
      : owner_(std::move(endpoint)), endpoint_(owner_.cast<Endpoint&>()) {
    for (int p = 0; p < communicator().size(); ++p) {
      inboxes_.push_back(std::make_unique<Inbox>(communicator(), p));
    }
  }
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;
  ~Messages() {
    communicator().close();
    const GilRelease release;
    queues_.clear();
  }

  py::object send(py::handle array, int dst, std::uint64_t tag, Timeout timeout, bool async) {
    const auto in = std::make_shared<Arrays>(array, Access::kRead, "array");
    if (dst == communicator().rank()) {
      inbox(dst).put(in->views()[0], tag);
      if (!async) return py::none();
      auto ended = std::make_shared<Work>([] {});
      ended->run();
      return pending(std::move(ended), py::none(), array);
    }
    return endpoint_.run(
        endpoint_.lane(to_rank(dst, "dst"), true),
        [in, dst, tag](BlockingCommunicator& c, CallOptions options) {
          options.tag = tag;
          c.send(in->views()[0], dst, options);
        },
        py::make_tuple(array, in->take_holder()), py::none(), timeout, async);
  }

  // The result is the Receive, which reports its source once done.
  py::object recv(py::handle array, int src, std::uint64_t tag, Timeout timeout, bool async) {
    Arrays to(array, Access::kWrite, "array");
    const auto receive = std::make_shared<Receive>(to.views()[0], tag);
    py::object result = py::cast(receive);
    const py::object kept = py::make_tuple(array, to.take_holder());
    if (src == kAnyRank) {
      for (const auto& each : inboxes_) each->add(receive);
    } else {
      inbox(to_rank(src, "src")).add(receive);
    }
    if (receive->is_done()) {
      if (async) return pending(receive->work(), result, kept);
      receive->work()->wait(Timeout(0));
      return result;
    }
    communicator().check_usable();
    if (src == communicator().rank()) return await_own(receive, result, kept, timeout, async);
    WorkQueue& queue = queue_of(src);
    if (!async && read_here(queue, *receive, src, timeout)) {
      receive->work()->wait(Timeout(0));
      return result;
    }
    const auto caller = std::make_shared<RecordedCaller>();
    communicator().count_submitted(1);
    queue.submit([this, receive, src, caller, timeout] {
      read(*receive, src, {.timeout = timeout, .caller = caller.get()});
      communicator().count_submitted(-1);
    });
    py::object call = pending(receive->work(), result, kept);
    if (async) return call;
    wait_interruptibly(*receive->work());
    return result;
  }

 private:
  BlockingCommunicator& communicator() noexcept { return endpoint_.communicator(); }
  Inbox& inbox(int p) { return *inboxes_.at(static_cast<std::size_t>(p)); }
  int to_rank(int rank, const char* argument) {
    return bindings::to_rank(py::int_(rank), argument, communicator().size());
  }
  WorkQueue& queue_of(int src) {
    const std::lock_guard lock(mutex_);
    return queues_[src];
  }
  py::object pending(std::shared_ptr<Work> work, const py::object& result, py::handle kept) {
    return py::cast(endpoint_.pending(std::move(work), kept, result));
  }
  // Waits for a message of this rank to itself, which another thread must send.
  py::object await_own(const Received& receive, const py::object& result, const py::object& kept,
                       Timeout timeout, bool async) {
    py::object call = pending(receive->work(), result, kept);
    if (async) return call;
    if (!wait_interruptibly(*receive->work(), timeout) && receive->claim()) {
      throw Error(ErrorCode::kTimeout, "rank " + std::to_string(communicator().rank()) +
                                           " has sent itself no message with tag " +
                                           std::to_string(receive->tag()));
    }
    return result;
  }
  bool read_here(WorkQueue& queue, Receive& receive, int src, Timeout timeout) {
    const PythonCaller caller;
    bool is_done = false;
    caller.run([&] {
      is_done = queue.try_run([&] { read(receive, src, {.timeout = timeout, .caller = &caller}); });
    });
    return is_done;
  }
  // Reads messages until the receive has ended. An error that ends the communicator ends it, too.
  void read(Receive& receive, int src, const CallOptions& options) noexcept {
    try {
      if (src != kAnyRank) {
        inbox(src).read_until(receive, options);
      } else {
        read_any_until(receive, options);
      }
    } catch (...) {
      if (receive.claim()) receive.finish(src, std::current_exception());
    }
  }
  void read_any_until(const Receive& end, const CallOptions& options) {
    options.caller->may_block();
    const auto start = Clock::now();
    auto pause = kShortestPause;
    while (!end.is_done()) {
      const auto lost = communicator().find_lost();  // before its last messages are read
      bool has_read = false;
      for (int p = 0; p < communicator().size(); ++p) {
        if (p != communicator().rank()) has_read |= inbox(p).read_if_any(options);
      }
      if (has_read) continue;
      options.caller->check_interrupt();
      communicator().check_usable();
      if (lost && !end.is_done()) {
        throw Error(ErrorCode::kPeerFailure,
                    "rank " + std::to_string(*lost) +
                        " has died or failed while this rank waits for a message from any rank",
                    {*lost});
      }
      if (Clock::now() - start > options.timeout) {
        throw Error(ErrorCode::kTimeout, "no rank has sent a message with tag " +
                                             std::to_string(end.tag()) + " in time");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }

  py::object owner_;
  Endpoint& endpoint_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;
  std::mutex mutex_;                 // guards the map; the queues guard themselves
  std::map<int, WorkQueue> queues_;  // of the receives from one rank, or from any
};

namespace {

py::dict calls(const py::object& owner) {
  static std::array<PyMethodDef, 2> definitions{
      FastCall<&Messages::send>::define("send"),
      FastCall<&Messages::recv>::define("recv"),
  };
  const py::capsule self(&owner.cast<Messages&>(), nullptr, [](PyObject* capsule) {
    Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(capsule)));
  });
  if (PyCapsule_SetContext(self.ptr(), owner.ptr()) != 0) throw py::error_already_set();
  owner.inc_ref();
  return bind_all(definitions, self);
}

}  // namespace

void bind_messages(py::module_& m) {
  py::class_<Receive, Received>(m, "Receive").def_property_readonly("source", &Receive::source);
  py::class_<Messages>(m, "Messages").def(py::init<py::object>()).def("calls", &calls);
}

}  // namespace fastdist::bindings
