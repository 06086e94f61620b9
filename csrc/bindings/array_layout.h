// Memory layout of arrays, and the errors for unusable layouts.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/array.h"
#include "bindings/dlpack.h"
#include "core/types.h"

namespace fastdist::bindings {

// Returns nothing if collectives do not support the type.
[[nodiscard]] std::optional<DType> dlpack_dtype(const dlpack::DataType& type);

[[nodiscard]] std::string type_name(py::handle object);

// Returns 0 for row-major memory, otherwise a hash of the order of the axes; empty if the memory
// has gaps. `item` is the stride of neighbours; null strides mean row-major.
[[nodiscard]] std::optional<std::uint32_t> axis_order(const std::int64_t* shape,
                                                      const std::int64_t* strides, int ndim,
                                                      std::int64_t item = 1);

// Returns the number of elements. Throws kValue if a length is negative or the bytes cannot be
// counted.
[[nodiscard]] std::size_t count_elements(const std::int64_t* shape, int ndim,
                                         std::size_t item_bytes, const char* argument,
                                         py::handle object);

[[noreturn]] void throw_strided(const char* argument, py::handle object);
[[noreturn]] void throw_read_only(const char* argument);
// `where` describes the actual location.
[[noreturn]] void throw_wrong_device(const char* argument, int device, const std::string& where);

// Views an array on GPU `device` through its `__cuda_array_interface__`. The protocol is described
// at numba.readthedocs.io, "CUDA Array Interface", version 3.
[[nodiscard]] TensorView view_cuda_interface(py::handle object, Access access, int device,
                                             const char* argument, py::object& holder);

}  // namespace fastdist::bindings
