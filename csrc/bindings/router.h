// Sends each call of a communicator to its engine: arrays on the host to the host's, arrays on a
// GPU to NCCL's.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <utility>

#include "bindings/endpoint.h"
#include "core/types.h"

namespace fastdist::bindings {

namespace py = pybind11;

class Router {
 public:
  // `hosts` is the host engine's endpoint. `general()` returns a function of Python (or None, when
  // the communicator has ended) that makes a call on arrays on GPUs: (op, arguments, timeout,
  // async).
  Router(py::object hosts, py::object general)
      : owner_(std::move(hosts)),
        endpoint_(owner_.cast<Endpoint&>()),
        general_(std::move(general)) {}

  [[nodiscard]] Endpoint& endpoint() noexcept { return endpoint_; }
  // Returns the array, or list of arrays, that says where a call's arrays are. The last two
  // arguments of a call are the timeout and `async`, and scatter has an input on the root only.
  [[nodiscard]] static py::handle first_array(PyObject* const* arguments, Py_ssize_t count) {
    return arguments[0] == Py_None ? arguments[count - 3] : arguments[0];
  }
  // Makes calls on the arrays of `gpu` go straight to `calls`, builtins of its engine by name. Call
  // it once; other threads may make calls meanwhile.
  void connect(int gpu, const py::dict& calls);
  // Makes a call on arrays of a GPU.
  [[nodiscard]] py::object call_gpu(Op op, int gpu, PyObject* const* arguments,
                                    Py_ssize_t count) const;

 private:
  [[nodiscard]] py::object call_at_once(Op op, int gpu, PyObject* const* arguments,
                                        Py_ssize_t count) const;

  py::object owner_;
  Endpoint& endpoint_;
  py::object general_;
  std::atomic<int> gpu_{-1};                // its release publishes calls_
  std::array<py::object, kOpCount> calls_;  // by Op; empty where there is no builtin
};

// Returns a dict of all collectives that take arrays as builtins bound to the Router `owner`.
py::dict routed_calls(const py::object& owner);

}  // namespace fastdist::bindings
