#include "bindings/make_call.h"

#include <memory>

#include "bindings/array.h"
#include "bindings/endpoint.h"
#include "core/error.h"
#include "cuda/devices.h"
#include "host/compress.h"
#include "host/kernels.h"

namespace fastdist::bindings {
namespace {

// --- where engines differ -----------------------------------------------------------------------

void all_reduce(BlockingCommunicator& c, const Call& call, const CallOptions& options) {
  if (!call.wire) return c.all_reduce(call.inputs(), call.outputs(), call.reduce_op, options);
  host::all_reduce_compressed(c, call.inputs(), call.outputs(), call.reduce_op, *call.wire,
                              options);
}

void all_reduce(GpuCommunicator& c, const Call& call, const CallOptions& options) {
  const std::size_t bytes = call.bucket_bytes == 0 ? nccl::kDefaultBucketBytes : call.bucket_bytes;
  c.all_reduce_fused(call.inputs(), call.outputs(), call.reduce_op, call.wire, bytes, options);
}

void broadcast(BlockingCommunicator& c, const Call& call, const CallOptions& options) {
  c.broadcast(call.inputs(), call.peer, options);
  if (!call.in || !call.out) return;
  for (std::size_t i = 0; i < call.outputs().size(); ++i) {
    const TensorView out = call.output(i);
    host::copy(out.data, call.input(i).data, out.bytes(), false);
  }
}

void broadcast(GpuCommunicator& c, const Call& call, const CallOptions& options) {
  c.broadcast(call.inputs(), call.outputs(), call.peer, options);
}

// Makes `calls(options)` as one collective. Here the ranks compare the whole list in each call, so
// a mismatch throws before any data moves.
void as_one(BlockingCommunicator&, const Signature& whole, CallOptions options, const auto& calls) {
  options.whole = &whole;
  calls(options);
}

void as_one(GpuCommunicator& c, const Signature& whole, const CallOptions& options,
            const auto& calls) {
  c.as_one(whole, options, calls);
}

// --- where they do not --------------------------------------------------------------------------

void make_arrays(auto& c, const Call& call, const CallOptions& options) {
  const auto for_each = [&](const auto& move) {
    const std::size_t count = call.inputs().size();
    if (count == 1) return move(0, options);
    as_one(c, call.signature(), options, [&](const CallOptions& each) {
      for (std::size_t i = 0; i < count; ++i) move(i, each);
    });
  };
  switch (call.op) {
    case Op::kAllReduce:
      return all_reduce(c, call, options);
    case Op::kReduce:
      return c.reduce(call.inputs(), c.rank() == call.peer ? call.outputs() : TensorViews{},
                      call.reduce_op, call.peer, options);
    case Op::kBroadcast:
      return broadcast(c, call, options);
    case Op::kAllGather:
      return for_each([&](std::size_t i, const CallOptions& each) {
        c.all_gather(call.input(i), call.output(i), each);
      });
    case Op::kGather:
      return for_each([&](std::size_t i, const CallOptions& each) {
        c.gather(call.input(i), call.output(i), call.peer, each);
      });
    case Op::kScatter:
      return for_each([&](std::size_t i, const CallOptions& each) {
        c.scatter(call.input(i), call.output(i), call.peer, each);
      });
    case Op::kReduceScatter:
      return for_each([&](std::size_t i, const CallOptions& each) {
        c.reduce_scatter(call.input(i), call.output(i), call.reduce_op, each);
      });
    case Op::kAllToAll:
      return for_each([&](std::size_t i, const CallOptions& each) {
        const auto counts = call.counts_of(i, static_cast<std::size_t>(c.size()));
        c.all_to_all(call.input(i), call.output(i), counts, each);
      });
    case Op::kSend: {
      CallOptions tagged = options;
      tagged.tag = call.tag;
      for (const TensorView& view : call.inputs()) c.send(view, call.peer, tagged);
      return;
    }
    case Op::kRecv:  // on GPUs; see `receive`
      for (const TensorView& view : call.outputs()) c.recv(view, call.peer, options);
      return;
    case Op::kBarrier:
      return c.barrier(options);
    default:
      return;
  }
}

// Makes a call, which the ranks compare as the one of which it is a step, if it is one.
void make(auto& c, const Call& call, const CallOptions& options) {
  if (!call.within) return make_arrays(c, call, options);
  const Signature whole = call.signature();
  CallOptions step = options;
  step.whole = &whole;
  make_arrays(c, call, step);
}

// Copies what this rank sends to itself.
py::object send_to_itself(Endpoint& hosts, const Call& call, const CallArguments& given) {
  hosts.communicator().check_usable();
  for (const TensorView& view : call.inputs()) hosts.inbox(call.peer).put(view, call.tag);
  if (!call.is_async) return py::reinterpret_borrow<py::object>(call.result);
  const auto ended = std::make_shared<Work>([] {});
  ended->run();
  return py::cast(hosts.pending(ended, given.array, call.result));
}

}  // namespace

py::object make_call(Endpoint& hosts, const CallArguments& given) {
  if (!given.stream.is_none()) {
    refuse(ErrorCode::kUnsupported, "no GPU can be used: ", cuda::why_unusable());
  }
  Call call(given, hosts.communicator());
  const auto holder = [](auto& arrays) { return arrays ? arrays->take_holder() : py::none(); };
  if (call.op == Op::kRecv) {
    const Wanted wanted{call.outputs(), call.peer, call.tag, Fit::kSame, call.timeout};
    const auto result = py::reinterpret_borrow<py::object>(call.result);
    if (!call.is_async) return receive(hosts, wanted, result);
    return receive_later(hosts, wanted, result, py::make_tuple(given.array, holder(call.in)));
  }
  if (call.op == Op::kSend && call.peer == hosts.communicator().rank()) {
    return send_to_itself(hosts, call, given);
  }
  Endpoint::Queue& queue = call.op == Op::kSend ? hosts.lane(call.peer, true) : hosts.collectives();
  const auto now = [&call](BlockingCommunicator& c, const CallOptions& options) {
    make(c, call, options);
  };
  if (!call.is_async && hosts.run_now(queue, now, call.timeout)) {  // without allocating memory
    return py::reinterpret_borrow<py::object>(call.result);
  }
  const auto kept = py::make_tuple(given.array, given.out, holder(call.in), holder(call.out));
  const auto shared = std::make_shared<const Call>(std::move(call));
  const auto later = [shared](BlockingCommunicator& c, const CallOptions& options) {
    make(c, *shared, options);
  };
  auto work = hosts.submit(queue, later, shared->timeout, shared->is_async);
  PendingCall pending = hosts.pending(std::move(work), kept, shared->result);
  if (shared->is_async) return py::cast(std::move(pending));
  wait_interruptibly(*pending.work);
  *pending.kept = py::none();
  return pending.result;
}

py::object make_call(Gpu& gpus, const CallArguments& given, nccl::StreamHandle stream) {
  const Call call(given, gpus.communicator(), gpus.communicator().device());
  return gpus.run(
      [&call](GpuCommunicator& c, const CallOptions& options) { make(c, call, options); }, stream,
      call.timeout, call.is_async, call.result, py::make_tuple(given.array, given.out));
}

// --- by where the arrays are --------------------------------------------------------------------

void Router::connect(std::shared_ptr<Gpu> engine) {
  engine_ = std::move(engine);
  gpu_.store(engine_->communicator().device(), std::memory_order_release);
}

py::object Router::make_call(const CallArguments& given) const {
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
  if (!stream) return {};
  py::object made = bindings::make_call(*engine_, given, static_cast<nccl::StreamHandle>(*stream));
  const bool is_async = given.async_op.ptr() != Py_False && PyObject_IsTrue(given.async_op.ptr());
  return is_async ? work_of_(made, given.first_array(), gpu) : made;
}

}  // namespace fastdist::bindings
