#include "bindings/router.h"

#include "bindings/array.h"
#include "bindings/make_call.h"
#include "core/error.h"

namespace fastdist::bindings {

void Router::connect(std::shared_ptr<Gpu> engine) {
  engine_ = std::move(engine);
  gpu_.store(engine_->communicator().device(), std::memory_order_release);
}

py::object Router::make_call(const CallArguments& given) const {
  const ForgetDescription forget;
  const int gpu = given.op == Op::kBarrier ? kOnHost : gpu_of(given.first_array(), device_of_);
  if (gpu == kOnHost) {
    if (given.stream.is_none()) return bindings::make_call(endpoint_, given);
    throw Error(ErrorCode::kValue,
                "stream is for arrays on GPUs, got an array that is not on a GPU");
  }
  if (gpu == gpu_.load(std::memory_order_acquire)) {
    if (py::object result = call_at_once(given, gpu)) return result;
  }
  const py::object general = general_();
  if (general.is_none()) throw Error(ErrorCode::kState, "the communicator is closed");
  return general(name_of(given.op), given.by_name());
}

// Returns nothing if the engine alone cannot make the call: it needs a lane, gives a stream, or its
// arrays' library has no C function for the current stream.
py::object Router::call_at_once(const CallArguments& given, int gpu) const {
  if (given.op == Op::kSend || given.op == Op::kRecv) return {};
  if (!given.stream.is_none()) return {};
  const auto stream = current_stream(given.first_array(), gpu);
  constexpr std::uintptr_t kPerThreadStream = 2;  // NCCL's settings decide whether it can be used
  if (!stream || reinterpret_cast<std::uintptr_t>(*stream) == kPerThreadStream) return {};
  py::object made = bindings::make_call(*engine_, given, static_cast<nccl::StreamHandle>(*stream));
  const bool is_async = given.async_op.ptr() != Py_False && PyObject_IsTrue(given.async_op.ptr());
  return is_async ? work_of_(made, given.first_array(), gpu) : made;
}

}  // namespace fastdist::bindings
