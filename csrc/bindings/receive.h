// Receives on hosts, which are matched with messages by their tags.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>

#include "bindings/endpoint.h"
#include "core/inbox.h"
#include "core/types.h"

namespace fastdist::bindings {

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
