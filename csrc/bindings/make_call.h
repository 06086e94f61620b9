// Collectives as builtins of Python, which cost a third of pybind11's dispatch: that takes as long
// as a small collective. Each parses its arguments into a Call, which an engine makes.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "bindings/call.h"
#include "bindings/endpoint.h"
#include "bindings/gpu.h"
#include "bindings/group.h"

namespace fastdist::bindings {

// Sends each call of a communicator to the engine for its arrays: the host engine, or NCCL's for
// arrays on a GPU.
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

py::object make_call(Endpoint& hosts, const CallArguments& given);
py::object make_call(Gpu& gpus, const CallArguments& given, nccl::StreamHandle stream);
inline py::object make_call(Gpu& gpus, const CallArguments& given) {
  return make_call(gpus, given, to_stream(given.stream));
}
inline py::object make_call(Router& router, const CallArguments& given) {
  return router.make_call(given);
}
inline py::object make_call(Group& group, const CallArguments& given) {
  return group.record(given);
}

// What the builtins of an engine are bound to.
template <class Engine>
struct Bound {
  Engine& engine;
  py::object owner;
  py::object timeout;  // of calls that give none
};

template <class Engine>
py::capsule bind(const py::object& owner, const py::object& timeout) {
  return {new Bound<Engine>{owner.cast<Engine&>(), owner, timeout},
          [](void* made) { delete static_cast<Bound<Engine>*>(made); }};
}
template <class Engine>
Bound<Engine>& bound_in(PyObject* capsule) {
  return *static_cast<Bound<Engine>*>(PyCapsule_GetPointer(capsule, nullptr));
}

template <class Engine, Op kOp>
PyObject* parse_and_make(PyObject* capsule, PyObject* const* values, Py_ssize_t positional,
                         PyObject* keywords) {
  try {
    auto& bound = bound_in<Engine>(capsule);
    const CallArguments given(kOp, bound.timeout, values, positional, keywords);
    return make_call(bound.engine, given).release().ptr();
  } catch (...) {
    translate_exception();
    return nullptr;
  }
}

// Returns a dict of all collectives, by name, as builtins bound to the engine that `owner` holds.
// `timeout`: seconds to wait for other ranks, for calls that do not give their own.
template <class Engine>
py::dict bind_calls(const py::object& owner, const py::object& timeout) {
  static auto definitions = []<std::size_t... kOps>(std::index_sequence<kOps...>) {
    return std::array{PyMethodDef{name_of(static_cast<Op>(kOps)).data(),
                                  reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(
                                      &parse_and_make<Engine, static_cast<Op>(kOps)>)),
                                  METH_FASTCALL | METH_KEYWORDS, nullptr}...};
  }(std::make_index_sequence<kCollectiveCount>());
  const py::capsule bound = bind<Engine>(owner, timeout);
  py::dict result;
  for (PyMethodDef& definition : definitions) {
    result[definition.ml_name] =
        py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, bound.ptr(), nullptr));
  }
  return result;
}

}  // namespace fastdist::bindings
