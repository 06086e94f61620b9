// Converts numeric arguments from Python; error messages name the argument.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>

namespace fastdist::bindings {

// Throws "<expected>, got <got>": a TypeError if Python has just raised one, otherwise a
// ValueError.
[[noreturn]] void throw_unexpected(const std::string& expected, pybind11::handle got);

// Returns a message of fastdist.collectives.hints.
template <class... Args>
[[nodiscard]] std::string hint(const char* function, Args&&... args) {
  return pybind11::module_::import("fastdist.collectives.hints")
      .attr(function)(std::forward<Args>(args)...)
      .template cast<std::string>();
}

// Converts a rank below `size`. If `self` is given, the rank must differ from it.
[[nodiscard]] int to_rank(pybind11::handle rank, const char* argument, int size,
                          std::optional<int> self = {});

// Converts a timeout in seconds; values above 1e9 count as 1e9.
[[nodiscard]] std::chrono::nanoseconds to_duration(pybind11::handle timeout,
                                                   bool may_be_zero = false);

}  // namespace fastdist::bindings
