#include "bindings/array_layout.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/signature.h"
#include "cuda/driver.h"

namespace fastdist::bindings {
namespace {

bool is_row_major(const std::int64_t* shape, const std::int64_t* strides, int ndim,
                  std::int64_t item) {
  std::int64_t expected = item;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

}  // namespace

std::optional<DType> dlpack_dtype(const dlpack::DataType& type) {
  using enum DType;
  struct Known {
    int code;
    int bits;
    DType dtype;
  };
  static constexpr Known kKnown[] = {
      {2, 32, kFloat32},    {4, 16, kBFloat16},  {2, 16, kFloat16},     {2, 64, kFloat64},
      {0, 64, kInt64},      {0, 32, kInt32},     {0, 16, kInt16},       {0, 8, kInt8},
      {1, 8, kUInt8},       {1, 16, kUInt16},    {1, 32, kUInt32},      {1, 64, kUInt64},
      {6, 8, kBool},        {5, 64, kComplex64}, {5, 128, kComplex128}, {10, 8, kFloat8E4M3FN},
      {12, 8, kFloat8E5M2},
  };
  for (const Known& known : kKnown) {
    if (known.code == type.code && known.bits == type.bits && type.lanes == 1) return known.dtype;
  }
  return std::nullopt;
}

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

void throw_strided(const char* argument, py::handle object) {
  const bool torch = py::hasattr(object, "contiguous");
  const bool cuda = py::hasattr(object, "__cuda_array_interface__");
  refuse(ErrorCode::kValue, argument, " must be dense, got a view with gaps or overlaps; call ",
         (torch  ? "x.contiguous()"
          : cuda ? "cupy.ascontiguousarray(x)"
                 : "numpy.ascontiguousarray(x)"),
         " first");
}

void throw_read_only(const char* argument) {
  refuse(ErrorCode::kValue, argument,
         " must be writable, got a read-only array; pass out= or copy it");
}

std::size_t count_elements(const std::int64_t* shape, int ndim, std::size_t item_bytes,
                           const char* argument, py::handle object) {
  std::int64_t count = 1;
  std::int64_t bytes = 0;
  bool fits = true;
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] < 0) {
      refuse(ErrorCode::kValue, argument, " has a negative length in axis ", i, ": ", shape[i],
             " (", type_name(object), ")");
    }
    fits = !__builtin_mul_overflow(count, shape[i], &count) && fits;
  }
  if (!fits || __builtin_mul_overflow(count, static_cast<std::int64_t>(item_bytes), &bytes)) {
    refuse(ErrorCode::kValue, argument, " has more elements than memory can hold (",
           type_name(object), ")");
  }
  return static_cast<std::size_t>(count);
}

std::optional<std::uint32_t> axis_order(const std::int64_t* shape, const std::int64_t* strides,
                                        int ndim, std::int64_t item) {
  if (strides == nullptr || is_row_major(shape, strides, ndim, item)) return 0;
  std::array<int, 64> axes{};
  int used = 0;
  std::int64_t count = 1;
  for (int i = 0; i < ndim; ++i) {
    count *= shape[i];
    if (shape[i] != 1 && used < static_cast<int>(axes.size()))
      axes[static_cast<std::size_t>(used++)] = i;
  }
  if (count == 0) return 0;
  const auto end = axes.begin() + used;
  std::stable_sort(axes.begin(), end, [&](int a, int b) { return strides[a] > strides[b]; });
  std::int64_t expected = item;
  for (auto it = std::make_reverse_iterator(end); it != axes.rend(); ++it) {
    if (strides[*it] != expected) return std::nullopt;
    expected *= shape[*it];
  }
  if (std::is_sorted(axes.begin(), end)) return 0;
  std::uint32_t hash = 2166136261U;
  for (auto it = axes.begin(); it != end; ++it) {
    hash = (hash ^ static_cast<std::uint32_t>(*it)) * 16777619U;
  }
  return ((hash ^ hash >> 16) | 1U) & 0xFFFFU;
}

void throw_wrong_device(const char* argument, int device, const std::string& where) {
  refuse(ErrorCode::kValue, argument, " must be on cuda:", device,
         ", this communicator's GPU, got an array ", where);
}

// --- arrays on GPUs without DLPack, such as numba's ---------------------------------------------

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
    refuse(ErrorCode::kType, argument,
           " must be a torch, cupy or other array on a GPU (DLPack or "
           "__cuda_array_interface__), got ",
           type_name(object));
  }
  const py::dict interface = object.attr("__cuda_array_interface__");
  holder = interface;
  const auto typestr = interface["typestr"].cast<std::string>();
  const auto dtype = dtype_of(typestr);
  if (!dtype) {
    refuse(ErrorCode::kType, argument, " has a dtype that collectives do not support (", typestr,
           ")");
  }
  const auto [address, read_only] = interface["data"].cast<std::pair<std::uintptr_t, bool>>();
  if (access == Access::kWrite && read_only) throw_read_only(argument);
  const auto shape = interface["shape"].cast<std::vector<std::int64_t>>();
  const std::size_t count = count_elements(shape.data(), static_cast<int>(shape.size()),
                                           size_of(*dtype), argument, object);
  const auto strides =
      interface.attr("get")("strides").cast<std::optional<std::vector<std::int64_t>>>();
  const auto order =
      axis_order(shape.data(), strides ? strides->data() : nullptr, static_cast<int>(shape.size()),
                 static_cast<std::int64_t>(size_of(*dtype)));
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
