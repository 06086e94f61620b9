// The collectives on host memory: converts Python arguments to views of memory.

#include <pybind11/pybind11.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/array.h"
#include "bindings/call_arguments.h"
#include "bindings/endpoint.h"
#include "bindings/fast_call.h"
#include "bindings/router.h"
#include "core/error.h"
#include "core/signature.h"
#include "host/compress.h"
#include "host/kernels.h"

namespace fastdist::bindings {
namespace {

using Timeout = std::chrono::nanoseconds;

// Makes one call per array. The ranks compare the whole list in each call, so a mismatch throws
// before any data moves.
template <class Call>
void one_by_one(std::size_t count, const Signature& whole, const CallOptions& options,
                const Call& call) {
  if (count == 1) return call(0, options);
  CallOptions each = options;
  each.whole = &whole;
  for (std::size_t i = 0; i < count; ++i) call(i, each);
}

// Returns an object that holds `things` until the call has ended.
template <class... Things>
py::object keep(Things&&... things) {
  return py::make_tuple(std::forward<Things>(things)...);
}

std::shared_ptr<Arrays> make_arrays(py::handle object, Access access, const char* argument) {
  return std::make_shared<Arrays>(object, access, argument);
}

py::object all_reduce(Endpoint& self, py::handle array, py::handle op_name, py::handle out,
                      py::handle compress, Timeout timeout, bool async) {
  const ReduceOp op = to_reduce_op(op_name);
  const bool in_place = out.is_none();
  if (!async && in_place && compress.is_none()) {  // the fast path: no allocation
    const Arrays in(array, Access::kWrite, "array");
    check_reducible_all(op, in.views());
    const auto call = [&in, op](BlockingCommunicator& c, const CallOptions& options) {
      c.all_reduce(in.views(), in.views(), op, options);
    };
    if (self.run_now(call, timeout)) return py::reinterpret_borrow<py::object>(array);
  }
  const auto in = make_arrays(array, in_place ? Access::kWrite : Access::kRead, "array");
  const auto to = in_place ? in : make_arrays(out, Access::kWrite, "out");
  check_fits(*in, *to);
  check_reducible_all(op, in->views());
  const auto wire = compress.is_none() ? std::nullopt : std::optional(to_wire_dtype(compress));
  return self.run(
      [in, to, op, wire](BlockingCommunicator& c, const CallOptions& options) {
        if (wire) {
          host::all_reduce_compressed(c, in->views(), to->views(), op, *wire, options);
        } else {
          c.all_reduce(in->views(), to->views(), op, options);
        }
      },
      keep(array, out, in->take_holder(), to->take_holder()), in_place ? array : out, timeout,
      async);
}

py::object reduce(Endpoint& self, py::handle array, py::handle op_name, py::handle root_rank,
                  py::handle out, Timeout timeout, bool async) {
  const ReduceOp op = to_reduce_op(op_name);
  const int root = self.root(root_rank);
  const bool is_root = self.communicator().rank() == root;
  const bool in_place = out.is_none();
  const auto in = make_arrays(array, is_root && in_place ? Access::kWrite : Access::kRead, "array");
  const auto to = in_place || !is_root ? in : make_arrays(out, Access::kWrite, "out");
  check_fits(*in, *to);
  check_reducible_all(op, in->views());
  return self.run(
      [in, to, op, root, is_root](BlockingCommunicator& c, const CallOptions& options) {
        c.reduce(in->views(), is_root ? to->views() : TensorViews{}, op, root, options);
      },
      keep(array, out, in->take_holder(), to->take_holder()), in_place ? array : out, timeout,
      async);
}

py::object broadcast(Endpoint& self, py::handle array, py::handle root_rank, py::handle out,
                     Timeout timeout, bool async) {
  const int root = self.root(root_rank);
  const bool is_root = self.communicator().rank() == root;
  const bool in_place = out.is_none();
  const auto from = is_root ? make_arrays(array, Access::kRead, "array") : nullptr;
  const auto to = is_root && in_place ? from
                                      : make_arrays(in_place ? array : out, Access::kWrite,
                                                    in_place ? "array" : "out");
  if (is_root) check_fits(*from, *to);
  return self.run(
      [from, to, root](BlockingCommunicator& c, const CallOptions& options) {
        c.broadcast(from ? from->views() : to->views(), root, options);
        if (!from) return;
        for (std::size_t i = 0; i < to->views().size(); ++i) {
          const TensorView& view = to->views()[i];
          host::copy(view.data, from->views()[i].data, view.bytes(), false);
        }
      },
      keep(array, out, from ? from->take_holder() : py::none(), to->take_holder()),
      in_place ? array : out, timeout, async);
}

py::object all_gather(Endpoint& self, py::handle array, py::handle out, Timeout timeout,
                      bool async) {
  const auto in = make_arrays(array, Access::kRead, "array");
  const auto to = make_arrays(out, Access::kWrite, "out");
  check_sizes("all_gather", *in, *to, self.communicator().rank(), self.communicator().size());
  return self.run(
      [in, to](BlockingCommunicator& c, const CallOptions& options) {
        const TensorViews parts = in->views();
        one_by_one(parts.size(), signature_of({.op = Op::kAllGather}, parts), options,
                   [&](std::size_t i, const CallOptions& each) {
                     c.all_gather(parts[i], to->views()[i], each);
                   });
      },
      keep(array, out, in->take_holder(), to->take_holder()), out, timeout, async);
}

py::object gather(Endpoint& self, py::handle array, py::handle root_rank, py::handle out,
                  Timeout timeout, bool async) {
  const int root = self.root(root_rank);
  const bool is_root = self.communicator().rank() == root;
  const auto in = make_arrays(array, Access::kRead, "array");
  const auto to = is_root ? make_arrays(out, Access::kWrite, "out") : in;
  if (is_root) {
    check_sizes("gather", *in, *to, self.communicator().rank(), self.communicator().size());
  } else {
    check_row_major(*in);
  }
  return self.run(
      [in, to, root, is_root](BlockingCommunicator& c, const CallOptions& options) {
        const TensorViews parts = in->views();
        const auto whole = signature_of(rooted(Op::kGather, root), parts);
        one_by_one(parts.size(), whole, options, [&](std::size_t i, const CallOptions& each) {
          c.gather(parts[i], is_root ? to->views()[i] : TensorView{}, root, each);
        });
      },
      keep(array, out, in->take_holder(), to->take_holder()), out, timeout, async);
}

py::object scatter(Endpoint& self, py::handle array, py::handle root_rank, py::handle out,
                   Timeout timeout, bool async) {
  const int root = self.root(root_rank);
  const bool is_root = self.communicator().rank() == root;
  const auto in = is_root ? make_arrays(array, Access::kRead, "array") : nullptr;
  const auto to = make_arrays(out, Access::kWrite, "out");
  if (is_root) {
    check_sizes("scatter", *to, *in, self.communicator().rank(), self.communicator().size());
  } else {
    check_row_major(*to);
  }
  return self.run(
      [in, to, root](BlockingCommunicator& c, const CallOptions& options) {
        const TensorViews parts = to->views();
        const auto whole = signature_of(rooted(Op::kScatter, root), parts);
        one_by_one(parts.size(), whole, options, [&](std::size_t i, const CallOptions& each) {
          c.scatter(in ? in->views()[i] : TensorView{}, parts[i], root, each);
        });
      },
      keep(array, out, in ? in->take_holder() : py::none(), to->take_holder()), out, timeout,
      async);
}

py::object reduce_scatter(Endpoint& self, py::handle array, py::handle op_name, py::handle out,
                          Timeout timeout, bool async) {
  const ReduceOp op = to_reduce_op(op_name);
  const auto in = make_arrays(array, Access::kRead, "array");
  const auto to = make_arrays(out, Access::kWrite, "out");
  check_sizes("reduce_scatter", *to, *in, self.communicator().rank(), self.communicator().size());
  check_reducible_all(op, in->views());
  return self.run(
      [in, to, op](BlockingCommunicator& c, const CallOptions& options) {
        const TensorViews wide = in->views();
        const auto whole = signature_of({.op = Op::kReduceScatter, .reduce_op = op}, wide);
        one_by_one(wide.size(), whole, options, [&](std::size_t i, const CallOptions& each) {
          c.reduce_scatter(wide[i], to->views()[i], op, each);
        });
      },
      keep(array, out, in->take_holder(), to->take_holder()), out, timeout, async);
}

// `counts` has, for each array, the elements from each rank to each rank; empty means equal parts.
py::object all_to_all(Endpoint& self, py::handle array, py::handle out,
                      std::vector<std::size_t> counts, Timeout timeout, bool async) {
  const auto in = make_arrays(array, Access::kRead, "array");
  const auto to = make_arrays(out, Access::kWrite, "out");
  const auto n = static_cast<std::size_t>(self.communicator().size());
  check_all_to_all(*in, *to, counts, n, static_cast<std::size_t>(self.communicator().rank()));
  return self.run(
      [in, to, n, counts = std::move(counts)](BlockingCommunicator& c, const CallOptions& options) {
        const TensorViews wide = in->views();
        const auto whole = all_to_all_signature(wide, counts);
        one_by_one(wide.size(), whole, options, [&](std::size_t i, const CallOptions& each) {
          const std::span table(counts);
          c.all_to_all(wide[i], to->views()[i],
                       table.empty() ? table : table.subspan(i * n * n, n * n), each);
        });
      },
      keep(array, out, in->take_holder(), to->take_holder()), out, timeout, async);
}

py::object send(Endpoint& self, py::handle array, py::handle dst_rank, Timeout timeout,
                bool async) {
  const int dst = self.peer(dst_rank, "dst");
  const auto in = make_arrays(array, Access::kRead, "array");
  return self.run_in_lane(
      dst, true,
      [in, dst](BlockingCommunicator& c, const CallOptions& options) {
        for (const TensorView& view : in->views()) c.send(view, dst, options);
      },
      keep(array, in->take_holder()), array, timeout, async);
}

py::object recv(Endpoint& self, py::handle array, py::handle src_rank, Timeout timeout,
                bool async) {
  const int src = self.peer(src_rank, "src");
  const auto to = make_arrays(array, Access::kWrite, "array");
  return self.run_in_lane(
      src, false,
      [to, src](BlockingCommunicator& c, const CallOptions& options) {
        for (const TensorView& view : to->views()) c.recv(view, src, options);
      },
      keep(array, to->take_holder()), array, timeout, async);
}

py::object barrier(Endpoint& self, Timeout timeout, bool async) {
  return self.run([](BlockingCommunicator& c, const CallOptions& options) { c.barrier(options); },
                  py::none(), py::none(), timeout, async);
}

// A builtin that calls `kFunction` for arrays on the host, and a Router's other engine for those on
// a GPU.
template <auto kFunction, Op kOp>
struct RoutedCall {
  static PyObject* call(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
    try {
      auto& router = *static_cast<Router*>(PyCapsule_GetPointer(capsule, nullptr));
      const ForgetDescription forget;
      if (count > 2) {
        const int gpu = gpu_of(Router::first_array(arguments, count));
        if (gpu != kOnHost) return router.call_gpu(kOp, gpu, arguments, count).release().ptr();
      }
      return FastCall<kFunction>::apply(router.endpoint(), arguments, count).release().ptr();
    } catch (...) {
      translate_exception();
      return nullptr;
    }
  }

  static PyMethodDef define() {
    return {name_of(kOp).data(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
            METH_FASTCALL, nullptr};
  }
};

}  // namespace

py::dict endpoint_calls(const py::object& owner) {
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
  return bind_all(definitions, owner.cast<Endpoint&>(), owner);
}

py::dict routed_calls(const py::object& owner) {
  static std::array<PyMethodDef, 10> definitions{
      RoutedCall<&all_reduce, Op::kAllReduce>::define(),
      RoutedCall<&reduce, Op::kReduce>::define(),
      RoutedCall<&broadcast, Op::kBroadcast>::define(),
      RoutedCall<&all_gather, Op::kAllGather>::define(),
      RoutedCall<&gather, Op::kGather>::define(),
      RoutedCall<&scatter, Op::kScatter>::define(),
      RoutedCall<&reduce_scatter, Op::kReduceScatter>::define(),
      RoutedCall<&all_to_all, Op::kAllToAll>::define(),
      RoutedCall<&send, Op::kSend>::define(),
      RoutedCall<&recv, Op::kRecv>::define(),
  };
  return bind_all(definitions, owner.cast<Router&>(), owner);
}

}  // namespace fastdist::bindings
