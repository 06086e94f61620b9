// Bindings as plain CPython builtins. They cost a third of pybind11's dispatch, which takes as long
// as a small collective.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/arguments.h"
#include "bindings/bind.h"
#include "core/error.h"

namespace fastdist::bindings {

template <class T>
T from_python(pybind11::handle object) {
  if constexpr (std::is_same_v<T, pybind11::handle>) {
    return object;
  } else if constexpr (std::is_same_v<T, std::chrono::nanoseconds>) {
    return to_duration(object);
  } else if constexpr (std::is_same_v<T, bool>) {
    return is_true(object);
  } else {
    return pybind11::cast<T>(object);
  }
}

// A builtin that calls `(self.*kMethod)(arguments…)` with positional arguments.
template <auto kMethod>
struct FastCall;

template <class Self, class... A, pybind11::object (Self::*kMethod)(A...)>
struct FastCall<kMethod> {
  static PyObject* call(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
    try {
      auto& self = *static_cast<Self*>(PyCapsule_GetPointer(capsule, nullptr));
      if (count != static_cast<Py_ssize_t>(sizeof...(A))) {
        throw Error(ErrorCode::kType, "expected " + std::to_string(sizeof...(A)) +
                                          " arguments, got " + std::to_string(count));
      }
      return [&]<std::size_t... I>(std::index_sequence<I...>) {
        return (self.*kMethod)(from_python<A>(arguments[I])...).release().ptr();
      }(std::index_sequence_for<A...>{});
    } catch (...) {
      translate_exception();
      return nullptr;
    }
  }

  static PyMethodDef define(const char* name) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)), METH_FASTCALL,
            nullptr};
  }
};

// Returns a dict of builtins by name, one for each of `definitions`, which must live forever. The
// builtins keep `capsule` alive, which is their `self`.
inline pybind11::dict bind_all(std::span<PyMethodDef> definitions, pybind11::handle capsule) {
  pybind11::dict result;
  for (PyMethodDef& definition : definitions) {
    result[definition.ml_name] = pybind11::reinterpret_steal<pybind11::object>(
        PyCFunction_NewEx(&definition, capsule.ptr(), nullptr));
  }
  return result;
}

}  // namespace fastdist::bindings
