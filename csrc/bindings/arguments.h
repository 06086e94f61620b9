// Numbers as users pass them; errors name the argument.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <optional>
#include <string>

namespace fastdist::bindings {

// Throws "<expected>, got <got>": a TypeError where Python has just raised one, else a ValueError.
[[noreturn]] void throw_unexpected(const std::string& expected, pybind11::handle got);

// A rank of `size`; with `self`, another one than that.
[[nodiscard]] int to_rank(pybind11::handle rank, const char* argument, int size,
                          std::optional<int> self = {});

// The argument `timeout`, in seconds; a huge value means forever.
[[nodiscard]] std::chrono::nanoseconds to_duration(pybind11::handle timeout,
                                                   bool may_be_zero = false);

}  // namespace fastdist::bindings
