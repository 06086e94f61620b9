// Bindings as plain CPython builtins. They cost a third of pybind11's dispatch, which takes as long
// as a small collective.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/bind.h"
#include "core/error.h"

namespace fastdist::bindings {

template <class T>
inline T from_python(PyObject* object) {
  return pybind11::cast<T>(pybind11::handle(object));
}
template <>
inline pybind11::handle from_python<pybind11::handle>(PyObject* object) {
  return object;
}
template <>
inline std::chrono::nanoseconds from_python<std::chrono::nanoseconds>(PyObject* object) {
  return to_duration(object);
}
template <>
inline bool from_python<bool>(PyObject* object) {
  const int value = PyObject_IsTrue(object);
  if (value < 0) throw pybind11::error_already_set();
  return value != 0;
}

// A builtin that calls `kFunction(self, arguments…)` with positional arguments.
template <auto kFunction>
struct FastCall;

template <class Self, class... A, pybind11::object (*kFunction)(Self&, A...)>
struct FastCall<kFunction> {
  static PyObject* call(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
    try {
      auto& self = *static_cast<Self*>(PyCapsule_GetPointer(capsule, nullptr));
      return apply(self, arguments, count).release().ptr();
    } catch (...) {
      translate_exception();
      return nullptr;
    }
  }
  static pybind11::object apply(Self& self, PyObject* const* arguments, Py_ssize_t count) {
    if (count != static_cast<Py_ssize_t>(sizeof...(A))) {
      throw Error(ErrorCode::kType, "expected " + std::to_string(sizeof...(A)) +
                                        " arguments, got " + std::to_string(count));
    }
    return invoke(self, arguments, std::index_sequence_for<A...>{});
  }
  template <std::size_t... I>
  static pybind11::object invoke(Self& self, PyObject* const* arguments,
                                 std::index_sequence<I...>) {
    return kFunction(self, from_python<A>(arguments[I])...);
  }

  static PyMethodDef define(const char* name) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)), METH_FASTCALL,
            nullptr};
  }
};

// Makes a builtin from `definition`, which must live forever. `owner` holds `self` and is kept
// alive.
template <class Self>
pybind11::object bind_fast(PyMethodDef& definition, Self& self, pybind11::handle owner) {
  const auto capsule =
      pybind11::reinterpret_steal<pybind11::object>(PyCapsule_New(&self, nullptr, [](PyObject* c) {
        Py_XDECREF(static_cast<PyObject*>(PyCapsule_GetContext(c)));
      }));
  if (!capsule) throw pybind11::error_already_set();
  PyCapsule_SetContext(capsule.ptr(), owner.inc_ref().ptr());
  return pybind11::reinterpret_steal<pybind11::object>(
      PyCFunction_NewEx(&definition, capsule.ptr(), nullptr));
}

// Returns a dict of a builtin for each of `definitions`, by name.
template <class Self, std::size_t kCount>
pybind11::dict bind_all(std::array<PyMethodDef, kCount>& definitions, Self& self,
                        pybind11::handle owner) {
  pybind11::dict result;
  for (PyMethodDef& definition : definitions) {
    result[definition.ml_name] = bind_fast(definition, self, owner);
  }
  return result;
}

}  // namespace fastdist::bindings
