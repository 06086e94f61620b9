// Messages with tags, from a named rank or from any.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/array.h"
#include "bindings/endpoint.h"
#include "bindings/make_call.h"
#include "core/error.h"

namespace fastdist::bindings {
namespace {

using Clock = std::chrono::steady_clock;
using Receives = std::vector<std::shared_ptr<Receive>>;

constexpr std::chrono::microseconds kShortestPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};

// Throws if no rank can send any more: one is lost, or all have closed.
void check_senders(BlockingCommunicator& c, std::optional<int> lost, bool have_closed) {
  if (lost) {
    throw Error(ErrorCode::kPeerFailure,
                "rank " + std::to_string(*lost) +
                    " has died or failed while this rank waits for a message from any rank",
                {*lost});
  }
  if (have_closed) {
    refuse(ErrorCode::kPeerFailure, "all other ranks have closed the communicator while rank ",
           c.rank(), " waits for a message from any rank");
  }
}

bool have_all_closed(BlockingCommunicator& c) {
  for (int p = 0; p < c.size(); ++p) {
    if (p != c.rank() && !c.has_closed(p)) return false;
  }
  return c.size() > 1;
}

void wait_for_any(Endpoint& endpoint, const Receive& receive, const CallOptions& options) {
  if (receive.is_done()) return;
  BlockingCommunicator& c = endpoint.communicator();
  options.caller->may_block();
  if (options.record != nullptr) {
    const TensorView out = receive.out();
    options.record->announce(signature_of(rooted(Op::kRecv, kAnyRank), {&out, 1}));
  }
  const auto start = Clock::now();
  auto pause = kShortestPause;
  while (!receive.is_done()) {
    const auto lost = c.find_lost();  // before its last messages are read
    const bool have_closed = have_all_closed(c);
    bool has_read = false;
    for (int p = 0; p < c.size(); ++p) {
      if (p != c.rank()) has_read |= endpoint.inbox(p).read_if_any(options);
    }
    options.caller->check_interrupt();
    c.check_usable();
    if (receive.is_done()) return;
    if (!has_read) check_senders(c, lost, have_closed);
    if (Clock::now() - start > options.timeout) {
      throw Error(ErrorCode::kTimeout, "no rank has sent such a message in time");
    }
    if (has_read) continue;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

Receives add_all(Endpoint& endpoint, const Wanted& wanted) {
  Receives receives;
  for (const TensorView& view : wanted.out) {
    receives.push_back(std::make_shared<Receive>(view, wanted.tag, wanted.fit));
    for (int p = 0; p < endpoint.communicator().size(); ++p) {
      if (wanted.src == kAnyRank || wanted.src == p) endpoint.inbox(p).add(receives.back());
    }
  }
  return receives;
}

// Waits until a receive that was added has ended. Throws its error.
void read(Endpoint& endpoint, Receive& receive, int src, const CallOptions& options) {
  if (src != kAnyRank) return endpoint.inbox(src).read_until(receive, options);
  try {
    try {
      wait_for_any(endpoint, receive, options);
    } catch (const Error& error) {
      std::set<std::uint64_t> kept;
      for (int p = 0; p < endpoint.communicator().size(); ++p) endpoint.inbox(p).add_kept(kept);
      const int rank = endpoint.communicator().rank();
      throw Error(error.code(), error.what() + describe_wait(rank, receive.tag(), "any rank", kept),
                  error.ranks());
    }
  } catch (...) {
    receive.withdraw();
  }
  receive.work()->wait(std::chrono::nanoseconds(0));
}

// Reads all; throws the first error.
void read_all(Endpoint& endpoint, const Receives& receives, int src, const CallOptions& options) {
  std::exception_ptr first;
  for (const auto& receive : receives) {
    try {
      read(endpoint, *receive, src, options);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

Inbox& inbox_of(Endpoint& endpoint, int src) {
  return endpoint.inbox(src == kAnyRank ? endpoint.communicator().rank() : src);
}

}  // namespace

py::object receive(Endpoint& endpoint, const Wanted& wanted, const py::object& result) {
  Inbox& inbox = inbox_of(endpoint, wanted.src);
  if (wanted.fit == Fit::kSame && wanted.src != kAnyRank) {
    endpoint.receive_here(
        [&](const CallOptions& options) {
          for (const TensorView& view : wanted.out) inbox.receive(view, wanted.tag, options);
        },
        inbox, wanted.timeout);
    return result;
  }
  endpoint.communicator().check_usable();
  const Receives receives = add_all(endpoint, wanted);
  endpoint.receive_here(
      [&](const CallOptions& options) { read_all(endpoint, receives, wanted.src, options); }, inbox,
      wanted.timeout);
  return result ? result : py::cast(receives.front());
}

py::object receive_later(Endpoint& endpoint, const Wanted& wanted, const py::object& result,
                         const py::object& kept) {
  endpoint.communicator().check_usable();
  const Receives receives = add_all(endpoint, wanted);
  const py::object made = result ? result : py::cast(receives.front());
  std::shared_ptr<Work> work;
  try {
    work = endpoint.submit(
        endpoint.lane(wanted.src, false),
        [&endpoint, receives, src = wanted.src](BlockingCommunicator&, const CallOptions& options) {
          read_all(endpoint, receives, src, options);
        },
        wanted.timeout, true);
  } catch (...) {
    for (const auto& each : receives) each->withdraw();
    throw;
  }
  // Messages may end a receive before its turn.
  if (receives.size() == 1) work = receives.front()->work();
  return py::cast(endpoint.pending(std::move(work), kept, made));
}

namespace {

// Receives one array, in a third of the time of pybind11's dispatch. The arguments are the array,
// the source or None for any, the tag, whether the message must have the array's size and dtype,
// the timeout, whether to return at once, and whether it is of an object.
PyObject* recv(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  try {
    Endpoint& endpoint = bound_in<Endpoint>(capsule).engine;
    if (count != 7) refuse(ErrorCode::kType, "expected 7 arguments, got ", count);
    const auto timeout = to_duration(arguments[4]);
    const auto tag = to_tag(arguments[2], is_true(arguments[6]));
    Arrays to(arguments[0], Access::kWrite, "array");
    if (to.views().size() != 1) {
      throw Error(ErrorCode::kType, "this receive is of one array, got a list");
    }
    const py::handle src = arguments[1];
    const Wanted wanted{
        to.views(), src.is_none() ? kAnyRank : to_rank(src, "src", endpoint.communicator().size()),
        tag, is_true(arguments[3]) ? Fit::kSame : Fit::kLess, timeout};
    if (!is_true(arguments[5])) return receive(endpoint, wanted, {}).release().ptr();
    const auto kept = py::make_tuple(py::handle(arguments[0]), to.take_holder());
    return receive_later(endpoint, wanted, {}, kept).release().ptr();
  } catch (...) {
    translate_exception();
    return nullptr;
  }
}

}  // namespace

void bind_messages(py::module_& m) {
  py::class_<Receive, std::shared_ptr<Receive>>(m, "Receive")
      .def_property_readonly("source", &Receive::source);
  m.def("receive_of", [](const py::object& owner) {
    static PyMethodDef definition{
        "recv", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&recv)), METH_FASTCALL,
        nullptr};
    const auto bound = bind<Endpoint>(owner, py::none());
    return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, bound.ptr(), nullptr));
  });
}

}  // namespace fastdist::bindings
