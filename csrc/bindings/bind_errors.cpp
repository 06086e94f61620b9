// Turns an Error into the Python exception of its code.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <new>
#include <string>

#include "bindings/arguments.h"
#include "bindings/caller.h"
#include "core/error.h"

namespace fastdist::bindings {
namespace {

py::handle known_hints = Py_None;  // never released: it may be used until the process ends

// Sets the Python error of `error`. Making it runs Python code, which may raise another error, such
// as KeyboardInterrupt or RecursionError; that error is then set instead. Never throws: the callers
// are C functions.
void raise(const Error& error) noexcept try {
  std::string message = error.what();
  const bool is_late = error.code() == ErrorCode::kTimeout;
  if (is_late || error.code() == ErrorCode::kPeerFailure) {
    const std::string why = explain_failure(is_late);
    if (!why.empty()) message += "\nwhy: " + why;
  }
  // Messages may be cut in the middle of a UTF-8 character.
  const auto text = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "replace"));
  if (!text) return;
  const auto fastdist_error = [&](const char* name) {
    const py::object type = py::module_::import("fastdist.errors").attr(name);
    const py::object value = type(text, py::tuple(py::cast(error.ranks())));
    PyErr_SetObject(type.ptr(), value.ptr());
  };
  switch (error.code()) {
    case ErrorCode::kValue:
      return PyErr_SetObject(PyExc_ValueError, text.ptr());
    case ErrorCode::kType:
      return PyErr_SetObject(PyExc_TypeError, text.ptr());
    case ErrorCode::kIndex:
      return PyErr_SetObject(PyExc_IndexError, text.ptr());
    case ErrorCode::kMemory:
      return PyErr_SetObject(PyExc_MemoryError, text.ptr());
    case ErrorCode::kSystem:
      return PyErr_SetObject(PyExc_OSError, text.ptr());
    case ErrorCode::kMismatch:
      return fastdist_error("CollectiveMismatchError");
    case ErrorCode::kPeerFailure:
      return fastdist_error("PeerFailureError");
    case ErrorCode::kTimeout:
      return fastdist_error("CollectiveTimeoutError");
    case ErrorCode::kUnsupported:
      return fastdist_error("UnsupportedError");
    case ErrorCode::kState:
      return fastdist_error("FastdistError");
  }
} catch (py::error_already_set& other) {
  other.restore();
} catch (const std::exception&) {  // no memory
  PyErr_NoMemory();
}

}  // namespace

void translate_exception() {
  try {
    throw;
  } catch (const Error& error) {
    raise(error);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

py::handle hints() { return known_hints; }

void bind_errors(py::module_& m) {
  m.def("set_hints", [](const py::object& module) { known_hints = module.inc_ref(); });
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace fastdist::bindings
