// Converts numeric arguments from Python; error messages name the argument.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace fastdist::bindings {

namespace py = pybind11;

// Throws "<expected>, got <got>": a TypeError if Python has just raised one, otherwise a
// ValueError.
[[noreturn]] void throw_unexpected(const std::string& expected, py::handle got);

// Returns the Python module that composes messages; None until it is given to `set_hints`.
[[nodiscard]] py::handle hints();

// Returns a message from that module.
template <class... Args>
[[nodiscard]] std::string hint(const char* function, Args&&... args) {
  return hints().attr(function)(std::forward<Args>(args)...).template cast<std::string>();
}

// Sets the Python error for the exception being handled. Must be called in a catch block.
void translate_exception();

[[nodiscard]] inline bool is_true(py::handle object) {
  const int value = PyObject_IsTrue(object.ptr());
  if (value < 0) throw py::error_already_set();
  return value != 0;
}

// Converts the tag of a message; None is 0. Messages of objects have tags of their own.
[[nodiscard]] std::uint64_t to_tag(py::handle tag, bool of_object = false);

// Converts a rank below `size`. If `self` is given, the rank must differ from it.
[[nodiscard]] int to_rank(py::handle rank, const char* argument, int size,
                          std::optional<int> self = {});

// Converts a timeout in seconds; values above 1e9 count as 1e9.
[[nodiscard]] std::chrono::nanoseconds to_duration(py::handle timeout, bool may_be_zero = false);

}  // namespace fastdist::bindings
