// Messages of one array, with tags, from a named rank or from any, and of a rank to itself.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>

#include "bindings/endpoint.h"
#include "core/inbox.h"

namespace fastdist::bindings {

inline constexpr int kAnyRank = -1;

// Returns the array, or a PendingCall of it. A message to this rank itself is copied.
py::object send_message(Endpoint& endpoint, py::handle array, int dst, std::uint64_t tag,
                        std::chrono::nanoseconds timeout, bool async);

// Returns the array if the message must be the same and its source is named, else the Receive,
// which reports its source once done; or a PendingCall of it.
py::object recv_message(Endpoint& endpoint, py::handle array, int src, std::uint64_t tag, Fit fit,
                        std::chrono::nanoseconds timeout, bool async);

}  // namespace fastdist::bindings
