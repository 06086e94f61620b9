// Messages with tags, from a named rank or from any.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/array.h"
#include "bindings/bind.h"
#include "bindings/endpoint.h"
#include "bindings/fast_call.h"
#include "bindings/messages.h"
#include "core/error.h"
#include "core/inbox.h"

namespace fastdist::bindings {
namespace {

using Timeout = std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

constexpr Timeout kAtOnce{0};
constexpr Timeout kForEver = std::chrono::hours(24 * 365);
constexpr std::chrono::microseconds kShortestPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};

void read_any_until(Endpoint& endpoint, const Receive& end, const CallOptions& options) {
  BlockingCommunicator& c = endpoint.communicator();
  options.caller->may_block();
  if (options.record != nullptr) {
    const TensorView out = end.out();
    options.record->announce(signature_of(rooted(Op::kRecv, kAnyRank), {&out, 1}));
  }
  const auto start = Clock::now();
  auto pause = kShortestPause;
  while (!end.is_done()) {
    const auto lost = c.find_lost();  // before its last messages are read
    bool has_read = false;
    for (int p = 0; p < c.size(); ++p) {
      if (p != c.rank()) has_read |= endpoint.inbox(p).read_if_any(options);
    }
    if (has_read) continue;
    options.caller->check_interrupt();
    c.check_usable();
    if (lost && !end.is_done()) {
      throw Error(ErrorCode::kPeerFailure,
                  "rank " + std::to_string(*lost) +
                      " has died or failed while this rank waits for a message from any rank",
                  {*lost});
    }
    if (Clock::now() - start > options.timeout) {
      throw Error(ErrorCode::kTimeout,
                  "no rank has sent a message with tag " + std::to_string(end.tag()) + " in time");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

// Reads messages until the receive has ended. What ends the communicator ends it, too.
void read(Endpoint& endpoint, Receive& receive, int src, const CallOptions& options) {
  try {
    if (src == kAnyRank) {
      read_any_until(endpoint, receive, options);
    } else {
      endpoint.inbox(src).read_until(receive, options);
    }
  } catch (...) {
    if (receive.claim()) receive.finish(src, std::current_exception());
  }
  receive.work()->wait(kAtOnce);
}

TensorView one_of(const Arrays& arrays) {
  if (arrays.views().size() == 1) return arrays.views()[0];
  throw Error(ErrorCode::kType,
              "a message with a tag, from any rank or to itself is one array, got a list");
}

}  // namespace

py::object send_message(Endpoint& endpoint, py::handle array, int dst, std::uint64_t tag,
                        Timeout timeout, bool async) {
  Arrays in(array, Access::kRead, "array");
  const TensorView view = one_of(in);
  if (dst == endpoint.communicator().rank()) {
    endpoint.inbox(dst).put(view, tag);
    if (!async) return py::reinterpret_borrow<py::object>(array);
    auto ended = std::make_shared<Work>([] {});
    ended->run();
    return py::cast(endpoint.pending(std::move(ended), array, array));
  }
  return endpoint.run(
      endpoint.lane(to_rank(py::int_(dst), "dst", endpoint.communicator().size()), Lane::kSends),
      [view, dst, tag](BlockingCommunicator& c, CallOptions options) {
        options.tag = tag;
        c.send(view, dst, options);
      },
      py::make_tuple(array, in.take_holder()), array, timeout, async);
}

py::object recv_message(Endpoint& endpoint, py::handle array, int src, std::uint64_t tag, Fit fit,
                        Timeout timeout, bool async) {
  BlockingCommunicator& c = endpoint.communicator();
  if (src != kAnyRank) src = to_rank(py::int_(src), "src", c.size());
  Arrays to(array, Access::kWrite, "array");
  const auto receive = std::make_shared<Receive>(one_of(to), tag, fit);
  py::object result = fit == Fit::kSame && src != kAnyRank
                          ? py::reinterpret_borrow<py::object>(array)
                          : py::cast(receive);
  const py::object kept = py::make_tuple(array, to.take_holder());
  c.check_usable();
  for (int p = 0; p < c.size(); ++p) {
    if (src == kAnyRank || src == p) endpoint.inbox(p).add(receive);
  }
  const bool is_own = src == c.rank();  // another thread must send it
  if (!receive->is_done() && !is_own) {
    Endpoint::Queue& queue = endpoint.lane(src, Lane::kTagged);
    const auto call = [&endpoint, receive, src](BlockingCommunicator&, const CallOptions& options) {
      read(endpoint, *receive, src, options);
    };
    if (!async && endpoint.run_now(queue, call, timeout)) return result;
    try {
      endpoint.submit(queue, call, timeout, async);
    } catch (...) {
      (void)receive->claim();  // so that no message is written to the array
      throw;
    }
  }
  py::object made = py::cast(endpoint.pending(receive->work(), kept, result));
  if (async) return made;
  if (!wait_interruptibly(*receive->work(), is_own ? timeout : kForEver) && receive->claim()) {
    throw Error(ErrorCode::kTimeout, "rank " + std::to_string(c.rank()) +
                                         " has sent itself no message with tag " +
                                         std::to_string(tag));
  }
  return result;
}

// Messages of one communicator, as builtins.
class Messages {
 public:
  explicit Messages(py::object endpoint)
      : owner_(std::move(endpoint)), endpoint_(owner_.cast<Endpoint&>()) {}

  py::object send(py::handle array, int dst, std::uint64_t tag, Timeout timeout, bool async) {
    return send_message(endpoint_, array, dst, tag, timeout, async);
  }
  py::object recv(py::handle array, int src, std::uint64_t tag, bool is_same, Timeout timeout,
                  bool async) {
    const Fit fit = is_same ? Fit::kSame : Fit::kLess;
    return recv_message(endpoint_, array, src, tag, fit, timeout, async);
  }

 private:
  py::object owner_;
  Endpoint& endpoint_;
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
  py::class_<Receive, std::shared_ptr<Receive>>(m, "Receive")
      .def_property_readonly("source", &Receive::source);
  py::class_<Messages>(m, "Messages").def(py::init<py::object>()).def("calls", &calls);
}

}  // namespace fastdist::bindings
