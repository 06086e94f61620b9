// A call in flight, as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <memory>
#include <optional>

#include "core/work.h"

namespace fastdist::bindings {

// A call that runs later: its arrays stay alive until it has ended, whoever drops this object.
struct PendingCall {
  std::shared_ptr<Work> work;
  pybind11::object result;
  // Shared with the communicator, and emptied by whoever first sees that the call has ended.
  std::shared_ptr<pybind11::object> kept;
};

// Waits for a call in slices, so that Ctrl-C gets through. Needs the GIL, releases it. False when
// `timeout` passes first.
bool wait_interruptibly(Work& work, std::chrono::nanoseconds timeout);

}  // namespace fastdist::bindings
