#include "bindings/router.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/array.h"
#include "core/error.h"

namespace fastdist::bindings {
namespace {

constexpr std::uintptr_t kPerThreadStream = 2;  // whose use depends on NCCL's settings

}  // namespace

void Router::connect(int gpu, const py::dict& calls) {
  for (const auto& [name, call] : calls) {
    const auto op = op_from_name(name.cast<std::string>());
    calls_[static_cast<std::size_t>(op.value())] = py::reinterpret_borrow<py::object>(call);
  }
  gpu_.store(gpu, std::memory_order_release);
}

py::object Router::call_gpu(Op op, int gpu, PyObject* const* arguments, Py_ssize_t count) const {
  const bool is_async = arguments[count - 1] != Py_False;
  if (gpu == gpu_.load(std::memory_order_acquire) && !is_async) {
    if (py::object result = call_at_once(op, gpu, arguments, count)) return result;
  }
  const py::object general = general_();
  if (general.is_none()) throw Error(ErrorCode::kState, "the communicator is closed");
  py::tuple given(count - 2);
  for (Py_ssize_t i = 0; i < count - 2; ++i) {
    given[static_cast<std::size_t>(i)] = py::handle(arguments[i]);
  }
  return general(name_of(op), given, py::handle(arguments[count - 2]),
                 py::handle(arguments[count - 1]));
}

// Returns nothing if the call is not among the builtins, or the arrays' library has no C function
// for its current stream.
py::object Router::call_at_once(Op op, int gpu, PyObject* const* arguments,
                                Py_ssize_t count) const {
  const py::object& call = calls_[static_cast<std::size_t>(op)];
  if (!call) return {};
  const auto stream = current_stream(first_array(arguments, count), gpu);
  if (!stream || reinterpret_cast<std::uintptr_t>(*stream) == kPerThreadStream) return {};
  constexpr std::size_t kMost = 10;
  const auto n = static_cast<std::size_t>(count);
  std::array<PyObject*, kMost> given{};
  if (n + 2 > kMost) throw Error(ErrorCode::kType, "too many arguments");
  std::copy_n(arguments, n - 2, given.begin());
  std::size_t end = n - 2;
  const py::int_ bucket_bytes(0);  // the engine chooses
  if (op == Op::kAllReduce) given[end++] = bucket_bytes.ptr();
  const py::int_ handle(reinterpret_cast<std::uintptr_t>(*stream));
  given[end++] = handle.ptr();
  given[end++] = arguments[n - 2];
  given[end++] = arguments[n - 1];
  auto result = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(call.ptr(), given.data(), end, nullptr));
  if (!result) throw py::error_already_set();
  return result;
}

}  // namespace fastdist::bindings
