// Sends each call of a communicator to its engine: arrays on the host to the host's, arrays on a
// GPU to NCCL's.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <utility>

#include "bindings/call.h"
#include "bindings/endpoint.h"
#include "bindings/gpu.h"

namespace fastdist::bindings {

class Router {
 public:
  // `hosts` is the host engine's endpoint. `general()` returns a function of Python (or None, when
  // the communicator has ended) that makes a call on arrays on GPUs: (op, arguments by name).
  // `device_of` tells where an array is; see `gpu_of`.
  Router(py::object hosts, py::object general, py::object device_of)
      : owner_(std::move(hosts)),
        endpoint_(owner_.cast<Endpoint&>()),
        general_(std::move(general)),
        device_of_(std::move(device_of)) {}

  // Makes calls on the arrays of the engine's GPU go straight to it. Call it once; other threads
  // may make calls meanwhile.
  void connect(std::shared_ptr<Gpu> engine);
  [[nodiscard]] py::object make_call(const CallArguments& given) const;

 private:
  [[nodiscard]] py::object call_at_once(const CallArguments& given, int gpu) const;

  py::object owner_;
  Endpoint& endpoint_;
  py::object general_;
  py::object device_of_;
  std::atomic<int> gpu_{kOnHost};  // the engine's; its release publishes the engine
  std::shared_ptr<Gpu> engine_;
};

}  // namespace fastdist::bindings
