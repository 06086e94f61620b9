#include "bindings/array.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "bindings/arguments.h"
#include "bindings/array_layout.h"
#include "bindings/dlpack.h"
#include "core/error.h"
#include "core/signature.h"
#include "cuda/devices.h"

namespace fastdist::bindings {
namespace {

// --- numpy ------------------------------------------------------------------------------------

constexpr int kCContiguous = 0x1;
constexpr int kAligned = 0x100;
constexpr int kWriteable = 0x400;

// The array is indexed by numpy's type numbers, which are part of its ABI.
std::optional<DType> numpy_dtype(const py::detail::PyArray_Proxy* array) {
  using enum DType;
  constexpr auto kNone = std::optional<DType>{};
  static_assert(sizeof(long) == 8);
  constexpr std::array<std::optional<DType>, 24> kBuiltin{
      kBool,   kInt8,  kUInt8,  kInt16,   kUInt16,  kInt32, kUInt32,    kInt64,
      kUInt64, kInt64, kUInt64, kFloat32, kFloat64, kNone,  kComplex64, kComplex128,
      kNone,   kNone,  kNone,   kNone,    kNone,    kNone,  kNone,      kFloat16};
  const auto* descr = py::detail::array_descriptor1_proxy(array->descr);
  if (descr->byteorder == '>') return std::nullopt;
  const int number = descr->type_num;
  if (number >= 0 && number < static_cast<int>(kBuiltin.size())) {
    return kBuiltin[static_cast<std::size_t>(number)];
  }
  // Dtypes registered by packages (ml_dtypes) are found by name.
  return dtype_from_name(py::handle(array->descr).attr("name").cast<std::string>());
}

TensorView view_numpy(py::handle object, Access access, const char* argument) {
  const auto* array = py::detail::array_proxy(object.ptr());
  const auto dtype = numpy_dtype(array);
  if (!dtype) {
    refuse(ErrorCode::kType, argument, " has dtype ",
           py::str(py::handle(array->descr)).cast<std::string>(),
           ", which collectives do not support; expected a bool, integer, float or complex dtype "
           "in native byte order");
  }
  if (access == Access::kWrite && (array->flags & kWriteable) == 0) throw_read_only(argument);
  if ((array->flags & kAligned) == 0) {
    refuse(ErrorCode::kValue, argument, " is not aligned to its dtype; copy it");
  }
  const std::span<const std::int64_t> lengths(array->dimensions,
                                              static_cast<std::size_t>(array->nd));
  std::size_t count = 1;
  for (const std::int64_t length : lengths) count *= static_cast<std::size_t>(length);
  std::optional<std::uint32_t> order = 0;
  if ((array->flags & kCContiguous) == 0) {
    order = axis_order(lengths.data(), array->strides, array->nd,
                       static_cast<std::int64_t>(size_of(*dtype)));
    if (!order) throw_strided(argument, object);
  }
  return {reinterpret_cast<std::byte*>(array->data), count, *dtype, *order, shape_word(lengths)};
}

// --- DLPack -----------------------------------------------------------------------------------

bool returns_true(py::handle object, PyObject* method) {
  const auto answer =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), method));
  if (!answer) PyErr_Clear();  // not a torch tensor
  return answer.ptr() == Py_True;
}

// Reports torch's lazy conjugation and negation, which leave the memory unchanged. Imaginary parts
// and the private torch._neg_view are negated lazily.
bool has_lazy_bits(const dlpack::Tensor& t, py::handle object) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  static PyObject* const is_conj = PyUnicode_InternFromString("is_conj");
  return returns_true(object, is_neg) || (t.dtype.code == 5 && returns_true(object, is_conj));
}

void check_placement(const dlpack::Device& device, std::optional<int> gpu, const char* argument) {
  const bool on_host = device.type == dlpack::kCpu || device.type == dlpack::kCudaHost;
  if (gpu) {
    if (device.type == dlpack::kCuda && device.id == *gpu) return;
    throw_wrong_device(argument, *gpu,
                       on_host ? "in host memory"
                               : "on device " + std::to_string(device.id) +
                                     " (DLPack device type " + std::to_string(device.type) + ")");
  }
  if (device.type == dlpack::kCuda && cuda::is_built()) {
    refuse(ErrorCode::kValue, argument,
           " must be in host memory, like the first array of the call, got an array on cuda:",
           device.id);
  }
  if (!on_host) {
    refuse(ErrorCode::kUnsupported, argument, " is on a device (DLPack device type ", device.type,
           ") that this build has no engine for; see `fastdist doctor`");
  }
}

TensorView view_dlpack(const dlpack::Tensor& t, py::handle object, std::optional<int> gpu,
                       const char* argument) {
  check_placement(t.device, gpu, argument);
  const auto dtype = dlpack_dtype(t.dtype);
  if (!dtype) {
    refuse(ErrorCode::kType, argument, " has a dtype that collectives do not support (",
           type_name(object), ", DLPack code ", int{t.dtype.code}, ", ", int{t.dtype.bits},
           " bits)");
  }
  const std::size_t count = count_elements(t.shape, t.ndim, size_of(*dtype), argument, object);
  const auto order = axis_order(t.shape, t.strides, t.ndim);
  if (!order) throw_strided(argument, object);
  if (t.data == nullptr && count != 0) {
    refuse(ErrorCode::kValue, argument, " has no memory: its data pointer is null (",
           type_name(object), " of ", count, " elements)");
  }
  if (has_lazy_bits(t, object)) {
    refuse(
        ErrorCode::kValue, argument,
        " is a lazily conjugated or negated torch view; call x.resolve_conj().resolve_neg() first");
  }
  return {static_cast<std::byte*>(t.data) + t.byte_offset, count, *dtype, *order,
          shape_word({t.shape, static_cast<std::size_t>(t.ndim)})};
}

// Returns the DLPack exchange table of a type, or null. The first types found are remembered: most
// programs use arrays of few types, such as tensors and parameters. Other threads read the list
// meanwhile: the release of an entry's type publishes its table.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  struct Known {
    std::atomic<PyTypeObject*> type{nullptr};
    const dlpack::ExchangeApi* api = nullptr;
  };
  static std::array<Known, 4> all;
  static std::mutex adding;
  for (const Known& known : all) {
    if (known.type.load(std::memory_order_acquire) == type) return known.api;
  }
  const py::handle object(reinterpret_cast<PyObject*>(type));
  if (!py::hasattr(object, "__dlpack_c_exchange_api__")) return nullptr;
  const py::object capsule = object.attr("__dlpack_c_exchange_api__");
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  if (api->version.major != 1 || api->tensor_from_object == nullptr) return nullptr;
  const std::lock_guard lock(adding);
  for (Known& known : all) {
    PyTypeObject* const other = known.type.load(std::memory_order_relaxed);
    if (other == type) break;  // added by another thread
    if (other != nullptr) continue;
    Py_INCREF(type);  // so that no other type gets its address
    known.api = api;
    known.type.store(type, std::memory_order_release);
    break;
  }
  return api;
}

// Raises TypeError for arrays of libraries that never change them, such as jax. The last type that
// passed is cached.
void check_mutable(py::handle object, const char* argument) {
  static std::atomic<PyTypeObject*> passed{nullptr};
  PyTypeObject* type = Py_TYPE(object.ptr());
  if (passed.load(std::memory_order_relaxed) == type) return;
  const std::string message = hint("immutable", argument, object);
  if (!message.empty()) throw Error(ErrorCode::kType, message);
  Py_INCREF(type);  // a cached type is never freed, so no other gets its address
  passed.store(type, std::memory_order_relaxed);
}

TensorView view_dlpack_object(py::handle object, Access access, std::optional<int> gpu,
                              const char* argument, py::object& holder) {
  // On GPUs jax cannot lend an array without ordering streams.
  if (access == Access::kWrite || gpu) check_mutable(object, argument);
  py::object array = py::reinterpret_borrow<py::object>(object);
  if (py::hasattr(array, "detach")) array = array.attr("detach")();
  py::dict options;
  if (gpu) {
    const auto device = array.attr("__dlpack_device__")().cast<std::pair<int, int>>();
    check_placement({device.first, device.second}, gpu, argument);
    // -1: no synchronization. The array is ready on the stream that the call is made on.
    options["stream"] = -1;
  }
  py::object capsule;
  try {
    capsule = array.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0), **options);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    capsule = array.attr("__dlpack__")(**options);  // the protocol before DLPack 1.0
  }
  holder = capsule;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    const auto* managed = static_cast<const dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (access == Access::kWrite && (managed->flags & dlpack::kReadOnly) != 0) {
      throw_read_only(argument);
    }
    return view_dlpack(managed->tensor, object, gpu, argument);
  }
  const auto* managed =
      static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  return view_dlpack(managed->tensor, object, gpu, argument);
}

// --- all of them -------------------------------------------------------------------------------

TensorView view_exchanged(const dlpack::ExchangeApi& api, py::handle object, std::optional<int> gpu,
                          const char* argument) {
  dlpack::Tensor tensor;
  if (api.tensor_from_object(object.ptr(), &tensor) != 0) {
    const py::error_already_set error;  // its text has a stack trace after the first line
    const std::string text = error.what();
    refuse(ErrorCode::kType, argument, " cannot be read in place (", type_name(object),
           "): ", text.substr(0, text.find('\n')));
  }
  return view_dlpack(tensor, object, gpu, argument);
}

PyTypeObject* numpy_type() {
  static PyObject* const ndarray =
      py::object(py::module_::import("numpy").attr("ndarray")).release().ptr();
  return reinterpret_cast<PyTypeObject*>(ndarray);
}

bool is_numpy_scalar(py::handle object) {
  static PyObject* const generic =
      py::object(py::module_::import("numpy").attr("generic")).release().ptr();
  return PyObject_IsInstance(object.ptr(), generic) == 1;
}

TensorView view_host_array(py::handle object, Access access, const char* argument,
                           py::object& holder) {
  PyTypeObject* type = Py_TYPE(object.ptr());
  PyTypeObject* const ndarray = numpy_type();
  if (type == ndarray) return view_numpy(object, access, argument);
  if (const auto* api = exchange_api(type)) return view_exchanged(*api, object, {}, argument);
  if (PyType_IsSubtype(type, ndarray) != 0) {
    if (py::module_::import("numpy.ma").attr("isMaskedArray")(object).cast<bool>()) {
      refuse(ErrorCode::kType, argument,
             " must not be a masked array, got a mask that collectives would ignore; pass "
             "x.filled(value), or x.data and x.mask");
    }
    return view_numpy(object, access, argument);
  }
  if (py::hasattr(object, "__dlpack__")) {
    return view_dlpack_object(object, access, {}, argument, holder);
  }
  const bool is_constant =
      py::isinstance<py::str>(object) || (access == Access::kWrite && is_numpy_scalar(object));
  if (PyObject_CheckBuffer(object.ptr()) != 0 && !is_constant) {
    // numpy understands every format of the buffer protocol and does not copy a memoryview.
    const auto view = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(object.ptr()));
    if (!view) throw py::error_already_set();
    holder = py::module_::import("numpy").attr("asarray")(view);
    return view_numpy(holder, access, argument);
  }
  throw Error(ErrorCode::kType, hint("not_an_array", argument, object));
}

TensorView view_array(py::handle object, Access access, std::optional<int> gpu,
                      const char* argument, py::object& holder) {
  if (!gpu) return view_host_array(object, access, argument, holder);
  if (const auto* api = exchange_api(Py_TYPE(object.ptr()))) {
    return view_exchanged(*api, object, gpu, argument);
  }
  if (py::hasattr(object, "__dlpack__")) {
    return view_dlpack_object(object, access, gpu, argument, holder);
  }
  return view_cuda_interface(object, access, *gpu, argument, holder);
}

// Throws unless each written array is disjoint from all other written arrays and from `read`.
void check_disjoint(TensorViews written, TensorViews read, const char* argument) {
  struct Extent {
    const std::byte* begin;
    const std::byte* end;
    bool is_written;
  };
  std::vector<Extent> extents;
  extents.reserve(written.size() + read.size());
  for (const TensorView& a : written) extents.push_back({a.data, a.data + a.bytes(), true});
  for (const TensorView& a : read) extents.push_back({a.data, a.data + a.bytes(), false});
  std::erase_if(extents, [](const Extent& e) { return e.begin == e.end; });
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  const std::byte* written_until = nullptr;
  const std::byte* used_until = nullptr;
  for (const Extent& e : extents) {
    if (e.begin < (e.is_written ? used_until : written_until)) {
      refuse(ErrorCode::kValue, argument,
             read.empty() ? " holds arrays that share memory; pass each of them once"
                          : " shares memory with the input or within itself; pass separate memory");
    }
    if (e.is_written) written_until = std::max(written_until, e.end);
    used_until = std::max(used_until, e.end);
  }
}

// Returns an item of a list or tuple, or nothing if it has fewer: another thread may change a list.
py::object item_of(PyObject* sequence, Py_ssize_t i) {
  auto item = py::reinterpret_steal<py::object>(PySequence_GetItem(sequence, i));
  if (!item) PyErr_Clear();
  return item;
}

}  // namespace

int gpu_of(py::handle arrays, py::handle device_of) {
  PyObject* const object = arrays.ptr();
  PyTypeObject* const type = Py_TYPE(object);
  if (type == numpy_type()) return kOnHost;
  if (PyList_Check(object) != 0 || PyTuple_Check(object) != 0) {
    int found = kOnHost;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      const py::object item = item_of(object, i);
      if (item) found = gpu_of(item, device_of);
      if (found != kSomeGpu) break;
    }
    return found;
  }
  if (const auto* api = exchange_api(type)) {
    dlpack::Tensor tensor;
    if (api->tensor_from_object(object, &tensor) != 0) {
      PyErr_Clear();  // the conversion reports it
      return kOnHost;
    }
    return tensor.device.type == dlpack::kCuda ? tensor.device.id : kOnHost;
  }
  // cupy's arrays on GPUs have the methods of a buffer, too.
  const py::handle members(reinterpret_cast<PyObject*>(type));
  if (PyObject_CheckBuffer(object) != 0 && !py::hasattr(members, "__dlpack_device__")) {
    return kOnHost;
  }
  const py::object found = device_of(arrays);
  return found.is_none() ? kOnHost : found.cast<int>();
}

std::optional<void*> current_stream(py::handle arrays, int gpu) {
  auto array = py::reinterpret_borrow<py::object>(arrays);
  if (PyList_Check(array.ptr()) != 0 || PyTuple_Check(array.ptr()) != 0) {
    array = item_of(array.ptr(), 0);
    if (!array) return std::nullopt;
  }
  const auto* api = exchange_api(Py_TYPE(array.ptr()));
  if (api == nullptr || api->current_stream == nullptr) return std::nullopt;
  void* stream = nullptr;
  if (api->current_stream(dlpack::kCuda, gpu, &stream) != 0) throw py::error_already_set();
  return stream;
}

Arrays::Arrays(py::handle object, Access access, const char* argument, std::optional<int> gpu)
    : argument_(argument),
      is_list_(PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0),
      one_(is_list_ ? TensorView{} : view_array(object, access, gpu, argument, holder_)) {
  if (!is_list_) return;
  // Holds the arrays themselves: the caller may change the list before the call ends.
  py::list holders;
  const auto items = py::reinterpret_steal<py::tuple>(PySequence_Tuple(object.ptr()));
  if (!items) throw py::error_already_set();
  list_.reserve(items.size());
  for (const py::handle item : items) {
    py::object holder;
    list_.push_back(view_array(item, access, gpu, argument, holder));
    if (holder) holders.append(std::move(holder));
  }
  holders.append(items);
  holder_ = std::move(holders);
  if (access == Access::kWrite) check_disjoint(list_, {}, argument);
}

void check_same_count(const Arrays& in, const Arrays& out) {
  if (in.is_list() == out.is_list() && in.views().size() == out.views().size()) return;
  const auto number = [](const Arrays& arrays) {
    return arrays.is_list() ? "a list of " + std::to_string(arrays.views().size())
                            : std::string("one array");
  };
  refuse(ErrorCode::kValue, out.argument(), " must be as many arrays as ", in.argument(),
         ": expected ", number(in), ", got ", number(out));
}

std::string text_of(const TensorView& view) {
  return std::string(name_of(view.dtype)) + " × " + std::to_string(view.count) +
         (view.order == 0 ? "" : ", not in row-major order");
}

void check_fits(const Arrays& in, const Arrays& out) {
  check_same_count(in, out);
  const TensorViews a = in.views();
  const TensorViews b = out.views();
  std::vector<TensorView> others;  // inputs whose output is a different array
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].count != b[i].count || a[i].dtype != b[i].dtype || a[i].order != b[i].order) {
      refuse(ErrorCode::kValue,
             "out must have the dtype, size and axis order of the input: expected ", text_of(a[i]),
             ", got ", text_of(b[i]));
    }
    if (a[i].data != b[i].data) others.push_back(a[i]);
  }
  if (!others.empty()) check_disjoint(b, others, "out");
}

void check_no_overlap(TensorViews in, const Arrays& out) {
  if (out.is_list()) return check_disjoint(out.views(), in, "out");
  const TensorView& a = in[0];
  const TensorView& b = out.views()[0];
  if (a.count != 0 && b.count != 0 && a.data < b.data + b.bytes() && b.data < a.data + a.bytes()) {
    throw Error(ErrorCode::kValue, "out shares memory with the input; pass separate memory");
  }
}

}  // namespace fastdist::bindings
