// Collectives as builtins of Python, which cost a third of pybind11's dispatch: that takes as long
// as a small collective. Each parses its arguments into a Call, which an engine makes.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <utility>

#include "bindings/bind.h"
#include "bindings/call.h"
#include "bindings/endpoint.h"
#include "bindings/gpu.h"
#include "bindings/group.h"
#include "bindings/router.h"

namespace fastdist::bindings {

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

template <class Engine, Op kOp>
PyObject* parse_and_make(PyObject* capsule, PyObject* const* values, Py_ssize_t positional,
                         PyObject* keywords) {
  try {
    auto& bound = *static_cast<Bound<Engine>*>(PyCapsule_GetPointer(capsule, nullptr));
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
  const py::capsule bound(new Bound<Engine>{owner.cast<Engine&>(), owner, timeout},
                          [](void* made) { delete static_cast<Bound<Engine>*>(made); });
  py::dict result;
  for (PyMethodDef& definition : definitions) {
    result[definition.ml_name] =
        py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, bound.ptr(), nullptr));
  }
  return result;
}

}  // namespace fastdist::bindings
