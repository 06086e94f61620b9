// Sends each call of a communicator to the engine for its arrays: the host engine, or NCCL's for
// arrays on a GPU.
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
  // `hosts` is the host engine's endpoint. `general()` returns a Python function that makes a call
  // on GPU arrays, given the op and the arguments by name, or None if the communicator has ended.
  // `device_of` tells where an array is; see `gpu_of`. `work_of` makes an asynchronous call's work
  // of a GpuWork, an array of the call and its GPU.
  Router(py::object hosts, py::object general, py::object device_of, py::object work_of)
      : owner_(std::move(hosts)),
        endpoint_(owner_.cast<Endpoint&>()),
        general_(std::move(general)),
        device_of_(std::move(device_of)),
        work_of_(std::move(work_of)) {}

  // Sends calls on arrays of `engine`'s GPU straight to `engine` from now on. Must be called only
  // once; other threads may make calls meanwhile.
  void connect(std::shared_ptr<Gpu> engine);
  [[nodiscard]] py::object make_call(const CallArguments& given) const;

 private:
  [[nodiscard]] py::object call_at_once(const CallArguments& given, int gpu) const;

  py::object owner_;
  Endpoint& endpoint_;
  py::object general_;
  py::object device_of_;
  py::object work_of_;
  std::atomic<int> gpu_{kOnHost};  // the engine's; storing it publishes engine_
  std::shared_ptr<Gpu> engine_;
};

}  // namespace fastdist::bindings
