// The GPU engine's collectives: converts Python arguments to views. A call is enqueued before it
// returns, so views are on the stack; the arrays of asynchronous calls are kept.

#include <array>
#include <optional>
#include <span>

#include "bindings/call_arguments.h"
#include "bindings/gpu.h"
#include "core/signature.h"

namespace fastdist::bindings {
namespace {

using Timeout = std::chrono::nanoseconds;

// Runs one call per array, as one collective.
template <class Call>
void one_by_one(GpuCommunicator& c, std::size_t count, const Signature& whole,
                const CallOptions& options, const Call& call) {
  if (count == 1) return call(0, options);
  c.as_one(whole, options, [&](const CallOptions& each) {
    for (std::size_t i = 0; i < count; ++i) call(i, each);
  });
}

// The destination of the result: `array` itself, or `out`.
struct Target {
  std::optional<Arrays> apart;
  const Arrays* arrays;

  Target(const Arrays& array, py::handle out, const Placement& placement) : arrays(&array) {
    if (out.is_none()) return;
    apart.emplace(out, Access::kWrite, "out", placement);
    arrays = &*apart;
  }
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;
  [[nodiscard]] TensorViews views() const noexcept { return arrays->views(); }
};

py::object all_reduce(Gpu& self, py::handle array, py::handle op_name, py::handle out,
                      py::handle compress, std::size_t bucket_bytes, StreamArgument stream,
                      Timeout timeout, bool async) {
  const ReduceOp op = to_reduce_op(op_name);
  const bool in_place = out.is_none();
  const Arrays in(array, in_place ? Access::kWrite : Access::kRead, "array", self.placement());
  const Target to(in, out, self.placement());
  check_fits(in, *to.arrays);
  check_reducible_all(op, in.views());
  const auto wire = compress.is_none() ? std::nullopt : std::optional(to_wire_dtype(compress));
  const std::size_t bytes = bucket_bytes == 0 ? nccl::kDefaultBucketBytes : bucket_bytes;
  return self.run(
      [&](GpuCommunicator& c, const CallOptions& options) {
        c.all_reduce_fused(in.views(), to.views(), op, wire, bytes, options);
      },
      stream, timeout, async, in_place ? array : out, py::make_tuple(array, out));
}

py::object reduce(Gpu& self, py::handle array, py::handle op_name, py::handle root_rank,
                  py::handle out, StreamArgument stream, Timeout timeout, bool async) {
  const ReduceOp op = to_reduce_op(op_name);
  const int root = self.root(root_rank);
  const bool is_root = self.communicator().rank() == root;
  const bool in_place = out.is_none();
  const Arrays in(array, is_root && in_place ? Access::kWrite : Access::kRead, "array",
                  self.placement());
  const Target to(in, is_root ? out : py::handle(py::none()), self.placement());
  check_fits(in, *to.arrays);
  check_reducible_all(op, in.views());
  return self.run(
      [&](GpuCommunicator& c, const CallOptions& options) {
        c.reduce(in.views(), is_root ? to.views() : TensorViews{}, op, root, options);
      },
      stream, timeout, async, in_place ? array : out, py::make_tuple(array, out));
}

py::object broadcast(Gpu& self, py::handle array, py::handle root_rank, py::handle out,
                     StreamArgument stream, Timeout timeout, bool async) {
  const int root = self.root(root_rank);
  const bool is_root = self.communicator().rank() == root;
  const bool in_place = out.is_none();
  std::optional<Arrays> from;
  std::optional<Arrays> to;
  if (is_root) from.emplace(array, Access::kRead, "array", self.placement());
  if (!is_root || !in_place) {
    to.emplace(in_place ? array : out, Access::kWrite, in_place ? "array" : "out",
               self.placement());
  }
  if (from && to) check_fits(*from, *to);
  const TensorViews ins = (from ? *from : *to).views();
  const TensorViews outs = (to ? *to : *from).views();
  return self.run([&](GpuCommunicator& c,
                      const CallOptions& options) { c.broadcast_from(ins, outs, root, options); },
                  stream, timeout, async, in_place ? array : out, py::make_tuple(array, out));
}

py::object all_gather(Gpu& self, py::handle array, py::handle out, StreamArgument stream,
                      Timeout timeout, bool async) {
  const Arrays in(array, Access::kRead, "array", self.placement());
  const Arrays to(out, Access::kWrite, "out", self.placement());
  check_sizes("all_gather", in, to, self.communicator().rank(), self.communicator().size());
  return self.run(
      [&](GpuCommunicator& c, const CallOptions& options) {
        const auto whole = signature_of({.op = Op::kAllGather}, in.views());
        one_by_one(c, in.views().size(), whole, options,
                   [&](std::size_t i, const CallOptions& each) {
                     c.all_gather(in.views()[i], to.views()[i], each);
                   });
      },
      stream, timeout, async, out, py::make_tuple(array, out));
}

py::object gather(Gpu& self, py::handle array, py::handle root_rank, py::handle out,
                  StreamArgument stream, Timeout timeout, bool async) {
  const int root = self.root(root_rank);
  const bool is_root = self.communicator().rank() == root;
  const Arrays in(array, Access::kRead, "array", self.placement());
  std::optional<Arrays> to;
  if (is_root) {
    to.emplace(out, Access::kWrite, "out", self.placement());
    check_sizes("gather", in, *to, self.communicator().rank(), self.communicator().size());
  } else {
    check_row_major(in);
  }
  return self.run(
      [&](GpuCommunicator& c, const CallOptions& options) {
        const auto whole = signature_of(rooted(Op::kGather, root), in.views());
        one_by_one(c, in.views().size(), whole, options,
                   [&](std::size_t i, const CallOptions& each) {
                     c.gather(in.views()[i], to ? to->views()[i] : TensorView{}, root, each);
                   });
      },
      stream, timeout, async, out, py::make_tuple(array, out));
}

py::object scatter(Gpu& self, py::handle array, py::handle root_rank, py::handle out,
                   StreamArgument stream, Timeout timeout, bool async) {
  const int root = self.root(root_rank);
  const bool is_root = self.communicator().rank() == root;
  std::optional<Arrays> in;
  if (is_root) in.emplace(array, Access::kRead, "array", self.placement());
  const Arrays to(out, Access::kWrite, "out", self.placement());
  if (is_root) {
    check_sizes("scatter", to, *in, self.communicator().rank(), self.communicator().size());
  } else {
    check_row_major(to);
  }
  return self.run(
      [&](GpuCommunicator& c, const CallOptions& options) {
        const auto whole = signature_of(rooted(Op::kScatter, root), to.views());
        one_by_one(c, to.views().size(), whole, options,
                   [&](std::size_t i, const CallOptions& each) {
                     c.scatter(in ? in->views()[i] : TensorView{}, to.views()[i], root, each);
                   });
      },
      stream, timeout, async, out, py::make_tuple(array, out));
}

py::object reduce_scatter(Gpu& self, py::handle array, py::handle op_name, py::handle out,
                          StreamArgument stream, Timeout timeout, bool async) {
  const ReduceOp op = to_reduce_op(op_name);
  const Arrays in(array, Access::kRead, "array", self.placement());
  const Arrays to(out, Access::kWrite, "out", self.placement());
  check_sizes("reduce_scatter", to, in, self.communicator().rank(), self.communicator().size());
  check_reducible_all(op, in.views());
  return self.run(
      [&](GpuCommunicator& c, const CallOptions& options) {
        const auto whole = signature_of({.op = Op::kReduceScatter, .reduce_op = op}, in.views());
        one_by_one(c, in.views().size(), whole, options,
                   [&](std::size_t i, const CallOptions& each) {
                     c.reduce_scatter(in.views()[i], to.views()[i], op, each);
                   });
      },
      stream, timeout, async, out, py::make_tuple(array, out));
}

// `counts` has, for each array, the elements from each rank to each rank; empty means equal parts.
py::object all_to_all(Gpu& self, py::handle array, py::handle out, std::vector<std::size_t> counts,
                      StreamArgument stream, Timeout timeout, bool async) {
  const Arrays in(array, Access::kRead, "array", self.placement());
  const Arrays to(out, Access::kWrite, "out", self.placement());
  const auto n = static_cast<std::size_t>(self.communicator().size());
  check_all_to_all(in, to, counts, n, static_cast<std::size_t>(self.communicator().rank()));
  return self.run(
      [&](GpuCommunicator& c, const CallOptions& options) {
        const auto whole = all_to_all_signature(in.views(), counts);
        one_by_one(c, in.views().size(), whole, options,
                   [&](std::size_t i, const CallOptions& each) {
                     const std::span table(counts);
                     c.all_to_all(in.views()[i], to.views()[i],
                                  table.empty() ? table : table.subspan(i * n * n, n * n), each);
                   });
      },
      stream, timeout, async, out, py::make_tuple(array, out));
}

py::object send(Gpu& self, py::handle array, py::handle dst_rank, StreamArgument stream,
                Timeout timeout, bool async) {
  const int dst = self.peer(dst_rank, "dst");
  const Arrays in(array, Access::kRead, "array", self.placement());
  return self.run(
      [&](GpuCommunicator& c, const CallOptions& options) {
        for (const TensorView& view : in.views()) c.send(view, dst, options);
      },
      stream, timeout, async, array, py::make_tuple(array));
}

py::object recv(Gpu& self, py::handle array, py::handle src_rank, StreamArgument stream,
                Timeout timeout, bool async) {
  const int src = self.peer(src_rank, "src");
  const Arrays to(array, Access::kWrite, "array", self.placement());
  return self.run(
      [&](GpuCommunicator& c, const CallOptions& options) {
        for (const TensorView& view : to.views()) c.recv(view, src, options);
      },
      stream, timeout, async, array, py::make_tuple(array));
}

py::object barrier(Gpu& self, StreamArgument stream, Timeout timeout, bool async) {
  return self.run([](GpuCommunicator& c, const CallOptions& options) { c.barrier(options); },
                  stream, timeout, async, py::none(), py::tuple());
}

}  // namespace

py::dict gpu_calls(const py::object& owner) {
  static std::array<PyMethodDef, 11> definitions{
      FastCall<&all_reduce>::define("all_reduce"),
      FastCall<&reduce>::define("reduce"),
      FastCall<&broadcast>::define("broadcast"),
      FastCall<&all_gather>::define("all_gather"),
      FastCall<&gather>::define("gather"),
      FastCall<&scatter>::define("scatter"),
      FastCall<&reduce_scatter>::define("reduce_scatter"),
      FastCall<&all_to_all>::define("all_to_all"),
      FastCall<&send>::define("send"),
      FastCall<&recv>::define("recv"),
      FastCall<&barrier>::define("barrier"),
  };
  return bind_all(definitions, owner.cast<Gpu&>(), owner);
}

}  // namespace fastdist::bindings
