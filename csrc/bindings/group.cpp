#include "bindings/group.h"

#include <exception>

#include "bindings/array.h"
#include "bindings/endpoint.h"
#include "bindings/make_call.h"
#include "core/error.h"

namespace fastdist::bindings {
namespace {

bool is_between_two(Op op) { return op == Op::kSend || op == Op::kRecv; }

void check_may_be_in_group(const CallArguments& given) {
  if (given.op == Op::kBarrier) {
    refuse(ErrorCode::kValue, "barrier cannot be in a group: leave the group first");
  }
  if (!given.stream.is_none() || to_bucket_bytes(given) != 0) {
    refuse(ErrorCode::kValue,
           "a call with stream or bucket_bytes cannot be in a group: leave the group first");
  }
  if (is_true(given.async_op)) {
    refuse(ErrorCode::kValue, name_of(given.op),
           "(async_op=True) cannot be in a group, which ends all its calls");
  }
}

}  // namespace

py::object Group::record(const CallArguments& given) {
  check_may_be_in_group(given);
  const int gpu = device_of_.is_none() ? kOnHost : gpu_of(given.first_array(), device_of_);
  Recorded recorded{given, {}, gpu != kOnHost};
  recorded.given.in_group = true;
  if (gpu != kSomeGpu) {  // others are checked when the GPU is known
    const auto place = gpu == kOnHost ? std::nullopt : std::optional(gpu);
    const Call checked(recorded.given, endpoint_.communicator(), place);
  }
  recorded.kept = recorded.given.own();
  calls_.push_back(std::move(recorded));
  return py::reinterpret_borrow<py::object>(given.result());
}

py::tuple Group::on_gpu() const {
  py::list arrays;
  py::object longest = py::none();
  for (const Recorded& call : calls_) {
    if (!call.is_on_gpu) continue;
    arrays.append(call.given.first_array());
    const py::handle timeout = call.given.timeout;
    if (longest.is_none() || to_duration(timeout) > to_duration(longest)) {
      longest = py::reinterpret_borrow<py::object>(timeout);
    }
  }
  return py::make_tuple(arrays, longest);
}

void Group::run_on_gpu(Gpu& gpu, const py::object& stream, const py::object& timeout) const {
  const nccl::StreamHandle handle = to_stream(stream);
  for (const bool between_two : {true, false}) {
    std::vector<CallArguments> part;
    for (const Recorded& call : calls_) {
      if (!call.is_on_gpu || is_between_two(call.given.op) != between_two) continue;
      part.push_back(call.given);
      part.back().timeout = timeout;
    }
    if (part.empty()) continue;
    gpu.run_group(
        [&] {
          for (const CallArguments& given : part) (void)make_call(gpu, given, handle);
        },
        handle, to_duration(timeout));
  }
}

void Group::run_on_hosts() const {
  std::exception_ptr first;
  std::vector<py::object> works;
  // An error waits until the calls before it have ended, an interrupt does not.
  const auto attempt = [&first](const auto& call) {
    try {
      call();
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
      if (!first) first = std::current_exception();
    } catch (const std::exception&) {
      if (!first) first = std::current_exception();
    }
  };
  for (const Recorded& call : calls_) {
    if (call.is_on_gpu || first) continue;
    CallArguments given = call.given;
    given.async_op = Py_True;
    attempt([&] { works.push_back(make_call(endpoint_, given)); });
  }
  for (const py::object& work : works) {
    attempt([&] {
      const auto& call = work.cast<const PendingCall&>();
      wait_interruptibly(*call.work);
      *call.kept = py::none();
    });
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace fastdist::bindings
