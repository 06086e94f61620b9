// How arrays lie in memory, and what is said of those that cannot be used; for array.cpp and
// array_cuda.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>

#include "bindings/array.h"
#include "core/types.h"

namespace fastdist::bindings {

[[nodiscard]] std::string type_name(pybind11::handle object);

// 0 for row-major memory, else a hash of the order of the axes; nothing where there are gaps.
// Strides in elements; null: row-major.
[[nodiscard]] std::optional<std::uint32_t> axis_order(const std::int64_t* shape,
                                                      const std::int64_t* strides, int ndim);

[[noreturn]] void throw_strided(const char* argument, pybind11::handle object);
[[noreturn]] void throw_read_only(const char* argument);
// `where` it lies instead of on this GPU.
[[noreturn]] void throw_elsewhere(const char* argument, int device, const std::string& where);

// An array by `__cuda_array_interface__`, on this GPU.
[[nodiscard]] TensorView view_cuda_interface(pybind11::handle object, Access access, int device,
                                             const char* argument, pybind11::object& holder);

}  // namespace fastdist::bindings
