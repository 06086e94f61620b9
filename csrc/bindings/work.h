// An asynchronous call as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <memory>

#include "core/work.h"

namespace fastdist::bindings {

// A queued call. Its arrays stay alive until it has ended, even if this object is dropped.
struct PendingCall {
  std::shared_ptr<Work> work;
  pybind11::object result;
  // Shared with the communicator. Emptied by the first thread that sees that the call has ended.
  std::shared_ptr<pybind11::object> kept;
  pybind11::object owner;  // the communicator
};

// Waits for a call in slices, so that Ctrl-C is handled. Needs the GIL and releases it. Returns
// false if `timeout` passes first.
bool wait_interruptibly(Work& work,
                        std::chrono::nanoseconds timeout = std::chrono::hours(24 * 365));

// Throws the error of a wait that has ended before its call.
[[noreturn]] void throw_unfinished(pybind11::handle timeout);

}  // namespace fastdist::bindings
