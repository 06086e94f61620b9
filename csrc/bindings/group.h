// Calls that are recorded, and made together when all of them are known: `Communicator.group`.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "bindings/call.h"
#include "bindings/endpoint.h"
#include "bindings/gpu.h"

namespace fastdist::bindings {

class Group {
 public:
  // `hosts` is the host engine's endpoint. `device_of` tells where an array is, see `gpu_of`; None:
  // all arrays are on the host.
  Group(py::object hosts, py::object device_of)
      : owner_(std::move(hosts)),
        endpoint_(owner_.cast<Endpoint&>()),
        device_of_(std::move(device_of)) {}

  // Checks a call, and returns the arrays that will hold its result.
  py::object record(const CallArguments& given);

  // Returns the first array of each call on a GPU, and the longest of their timeouts.
  [[nodiscard]] py::tuple on_gpu() const;
  // Makes the calls on a GPU, in at most two launches: first those between two ranks, as
  // collectives may have several steps that wait for all ranks.
  void run_on_gpu(Gpu& gpu, const py::object& stream, const py::object& timeout) const;
  // Makes the other calls at the same time. Throws the first error, when all calls have ended.
  void run_on_hosts() const;

 private:
  struct Recorded {
    CallArguments given;
    py::object kept;  // what `given` refers to
    bool is_on_gpu;
  };

  py::object owner_;
  Endpoint& endpoint_;
  py::object device_of_;
  std::vector<Recorded> calls_;
};

}  // namespace fastdist::bindings
