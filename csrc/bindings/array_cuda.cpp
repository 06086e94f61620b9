// Views of GPU arrays without DLPack, such as numba's. The protocol is described at
// numba.readthedocs.io, "CUDA Array Interface", version 3.

#include <pybind11/stl.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/array_layout.h"
#include "core/error.h"
#include "core/signature.h"
#include "cuda/driver.h"

namespace py = pybind11;

namespace fastdist::bindings {
namespace {

std::optional<DType> dtype_of(const std::string& typestr) {
  constexpr std::string_view kKinds = "iuf  cb";  // indexed by DLPack's codes
  if (typestr.size() < 3 || typestr.size() > 4 || typestr[0] == '>') return std::nullopt;
  const auto code = kKinds.find(typestr[1]);
  const int bits = 8 * std::atoi(typestr.c_str() + 2);
  const bool is_number = typestr.find_first_not_of("0123456789", 2) == std::string::npos;
  if (code == kKinds.npos || bits > 128 || !is_number) return std::nullopt;
  return dlpack_dtype({static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1});
}

}  // namespace

TensorView view_cuda_interface(py::handle object, Access access, int device, const char* argument,
                               py::object& holder) {
  if (!py::hasattr(object, "__cuda_array_interface__")) {
    if (py::hasattr(object, "__array_interface__") || PyObject_CheckBuffer(object.ptr()) != 0) {
      throw_wrong_device(argument, device, "in host memory (" + type_name(object) + ")");
    }
    throw Error(ErrorCode::kType, std::string(argument) +
                                      " must be a torch, cupy or other array on a GPU (DLPack or "
                                      "__cuda_array_interface__), got " +
                                      type_name(object));
  }
  const py::dict interface = object.attr("__cuda_array_interface__");
  holder = interface;
  const auto typestr = interface["typestr"].cast<std::string>();
  const auto dtype = dtype_of(typestr);
  if (!dtype) {
    throw Error(
        ErrorCode::kType,
        std::string(argument) + " has a dtype that collectives do not support (" + typestr + ")");
  }
  const auto [address, read_only] = interface["data"].cast<std::pair<std::uintptr_t, bool>>();
  if (access == Access::kWrite && read_only) throw_read_only(argument);
  const auto shape = interface["shape"].cast<std::vector<std::int64_t>>();
  const std::size_t count = count_elements(shape.data(), static_cast<int>(shape.size()),
                                           size_of(*dtype), argument, object);
  std::vector<std::int64_t> strides;
  const py::object given = interface.attr("get")("strides");
  if (!given.is_none()) {
    const auto item = static_cast<std::int64_t>(size_of(*dtype));
    for (const std::int64_t bytes : given.cast<std::vector<std::int64_t>>()) {
      strides.push_back(bytes % item == 0 ? bytes / item : 0);
    }
  }
  const auto order = axis_order(shape.data(), given.is_none() ? nullptr : strides.data(),
                                static_cast<int>(shape.size()));
  if (!order) throw_strided(argument, object);
  auto* const data = reinterpret_cast<std::byte*>(address);
  if (count != 0) {
    const auto found = cuda::device_of(data);
    if (found != device) {
      throw_wrong_device(argument, device,
                         found ? "on cuda:" + std::to_string(*found) : "in host memory");
    }
  }
  return {data, count, *dtype, *order, shape_word(shape)};
}

}  // namespace fastdist::bindings
