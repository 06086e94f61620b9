// The collectives of the host engine, from Python's arguments to views of memory.

#include <pybind11/pybind11.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/array.h"
#include "bindings/fast_call.h"
#include "bindings/host.h"
#include "core/error.h"
#include "host/compress.h"
#include "host/kernels.h"

namespace fastdist::bindings {
namespace {

using host::HostCommunicator;
using host::Machine;
using host::SharedBlock;
using host::Tuning;

ReduceOp to_reduce_op(py::handle name) {
  Py_ssize_t length = 0;
  const char* text =
      PyUnicode_Check(name.ptr()) != 0 ? PyUnicode_AsUTF8AndSize(name.ptr(), &length) : nullptr;
  const auto op = text == nullptr ? std::nullopt
                                  : reduce_op_from_name({text, static_cast<std::size_t>(length)});
  if (op) return *op;
  PyErr_Clear();
  throw Error(ErrorCode::kValue, "op must be sum, mean, prod, min, max, and, or or xor, got " +
                                     py::repr(name).cast<std::string>());
}

DType to_wire(py::handle name) {
  const auto text = py::str(name).cast<std::string>();
  if (text == "fp16") return DType::kFloat16;
  if (text == "bf16") return DType::kBFloat16;
  if (text == "fp8") return DType::kFloat8E4M3FN;
  throw Error(ErrorCode::kValue, "compress must be None, fp16, bf16 or fp8, got " + text);
}

void check_reducible_all(ReduceOp op, TensorViews arrays) {
  for (const TensorView& a : arrays) check_reducible(op, a.dtype);
}

const TensorView& only(const Arrays& arrays) {
  if (arrays.is_list()) throw Error(ErrorCode::kType, "expected one array, got a list");
  const TensorView& view = arrays.views()[0];
  return view;
}

const TensorView& row_major(const Arrays& arrays) {
  const TensorView& view = only(arrays);
  if (view.order != 0) {
    throw Error(ErrorCode::kValue,
                "this collective splits or joins arrays along axis 0 and needs row-major order; "
                "call numpy.ascontiguousarray(x) or x.contiguous() first");
  }
  return view;
}

void check_sizes(const TensorView& small, const TensorView& large, int ranks, const char* rule) {
  if (small.dtype == large.dtype && small.count * static_cast<std::size_t>(ranks) == large.count) {
    check_apart(small, large);
    return;
  }
  throw Error(ErrorCode::kValue, std::string(rule) + " with " + std::to_string(ranks) +
                                     " ranks, got " + std::string(name_of(small.dtype)) + " × " +
                                     std::to_string(small.count) + " and " +
                                     std::string(name_of(large.dtype)) + " × " +
                                     std::to_string(large.count));
}

// What a call reads and writes must outlive it when it runs later.
template <class... Things>
py::object keep(Things&&... things) {
  return py::make_tuple(std::forward<Things>(things)...);
}

std::shared_ptr<Arrays> make_arrays(py::handle object, Access access, const char* argument) {
  return std::make_shared<Arrays>(object, access, argument);
}

py::object all_reduce(Host& self, py::handle array, py::handle op_name, py::handle out,
                      py::handle compress, double timeout_s, bool async) {
  const ReduceOp op = to_reduce_op(op_name);
  const bool in_place = out.is_none();
  if (!async && in_place && compress.is_none()) {  // nothing to keep, nothing to allocate
    const Arrays in(array, Access::kWrite, "array");
    check_reducible_all(op, in.views());
    const auto call = [&in, op](HostCommunicator& c, const CallOptions& options) {
      c.all_reduce(in.views(), in.views(), op, options);
    };
    if (self.run_now(call, timeout_s)) return py::reinterpret_borrow<py::object>(array);
  }
  const auto in = make_arrays(array, in_place ? Access::kWrite : Access::kRead, "array");
  const auto to = in_place ? in : make_arrays(out, Access::kWrite, "out");
  check_fits(*in, *to);
  check_reducible_all(op, in->views());
  const auto wire = compress.is_none() ? std::nullopt : std::optional(to_wire(compress));
  return self.run(
      [in, to, op, wire](HostCommunicator& c, const CallOptions& options) {
        if (wire) {
          host::all_reduce_compressed(c, in->views(), to->views(), op, *wire, options);
        } else {
          c.all_reduce(in->views(), to->views(), op, options);
        }
      },
      keep(array, out, in->take_holder(), to->take_holder()), in_place ? array : out, timeout_s,
      async);
}

py::object reduce(Host& self, py::handle array, py::handle op_name, int root, py::handle out,
                  double timeout_s, bool async) {
  const ReduceOp op = to_reduce_op(op_name);
  self.check_root(root);
  const bool is_root = self.communicator().rank() == root;
  const bool in_place = out.is_none();
  const auto in = make_arrays(array, is_root && in_place ? Access::kWrite : Access::kRead, "array");
  const auto to = in_place || !is_root ? in : make_arrays(out, Access::kWrite, "out");
  check_fits(*in, *to);
  check_reducible_all(op, in->views());
  return self.run(
      [in, to, op, root, is_root](HostCommunicator& c, const CallOptions& options) {
        c.reduce(in->views(), is_root ? to->views() : TensorViews{}, op, root, options);
      },
      keep(array, out, in->take_holder(), to->take_holder()), in_place ? array : out, timeout_s,
      async);
}

py::object broadcast(Host& self, py::handle array, int root, py::handle out, double timeout_s,
                     bool async) {
  self.check_root(root);
  const bool is_root = self.communicator().rank() == root;
  const bool in_place = out.is_none();
  const auto from = is_root ? make_arrays(array, Access::kRead, "array") : nullptr;
  const auto to = is_root && in_place ? from
                                      : make_arrays(in_place ? array : out, Access::kWrite,
                                                    in_place ? "array" : "out");
  if (is_root) check_fits(*from, *to);
  return self.run(
      [from, to, root](HostCommunicator& c, const CallOptions& options) {
        c.broadcast(from ? from->views() : to->views(), root, options);
        if (!from) return;
        for (std::size_t i = 0; i < to->views().size(); ++i) {
          const TensorView& view = to->views()[i];
          host::copy(view.data, from->views()[i].data, view.bytes(), false);
        }
      },
      keep(array, out, from ? from->take_holder() : py::none(), to->take_holder()),
      in_place ? array : out, timeout_s, async);
}

py::object all_gather(Host& self, py::handle array, py::handle out, double timeout_s, bool async) {
  const auto in = make_arrays(array, Access::kRead, "array");
  const auto to = make_arrays(out, Access::kWrite, "out");
  check_sizes(row_major(*in), row_major(*to), self.communicator().size(),
              "all_gather: out must hold every rank's array");
  return self.run(
      [in, to](HostCommunicator& c, const CallOptions& options) {
        c.all_gather(only(*in), only(*to), options);
      },
      keep(array, out, in->take_holder(), to->take_holder()), out, timeout_s, async);
}

py::object gather(Host& self, py::handle array, int root, py::handle out, double timeout_s,
                  bool async) {
  self.check_root(root);
  const bool is_root = self.communicator().rank() == root;
  const auto in = make_arrays(array, Access::kRead, "array");
  const auto to = is_root ? make_arrays(out, Access::kWrite, "out") : in;
  const TensorView& view = row_major(*in);
  if (is_root) {
    check_sizes(view, row_major(*to), self.communicator().size(),
                "gather: out must hold every rank's array on the root");
  }
  return self.run(
      [in, to, root, is_root](HostCommunicator& c, const CallOptions& options) {
        c.gather(only(*in), is_root ? only(*to) : TensorView{}, root, options);
      },
      keep(array, out, in->take_holder(), to->take_holder()), out, timeout_s, async);
}

py::object scatter(Host& self, py::handle array, int root, py::handle out, double timeout_s,
                   bool async) {
  self.check_root(root);
  const bool is_root = self.communicator().rank() == root;
  const auto to = make_arrays(out, Access::kWrite, "out");
  const auto in = is_root ? make_arrays(array, Access::kRead, "array") : to;
  const TensorView& view = row_major(*to);
  if (is_root) {
    check_sizes(view, row_major(*in), self.communicator().size(),
                "scatter: the root's array must hold every rank's part");
  }
  return self.run(
      [in, to, root, is_root](HostCommunicator& c, const CallOptions& options) {
        c.scatter(is_root ? only(*in) : TensorView{}, only(*to), root, options);
      },
      keep(array, out, in->take_holder(), to->take_holder()), out, timeout_s, async);
}

py::object reduce_scatter(Host& self, py::handle array, py::handle op_name, py::handle out,
                          double timeout_s, bool async) {
  const ReduceOp op = to_reduce_op(op_name);
  const auto in = make_arrays(array, Access::kRead, "array");
  const auto to = make_arrays(out, Access::kWrite, "out");
  check_sizes(row_major(*to), row_major(*in), self.communicator().size(),
              "reduce_scatter: the array must hold one part per rank");
  check_reducible(op, only(*in).dtype);
  return self.run(
      [in, to, op](HostCommunicator& c, const CallOptions& options) {
        c.reduce_scatter(only(*in), only(*to), op, options);
      },
      keep(array, out, in->take_holder(), to->take_holder()), out, timeout_s, async);
}

py::object all_to_all(Host& self, py::handle array, py::handle out, std::vector<std::size_t> counts,
                      double timeout_s, bool async) {
  const auto in = make_arrays(array, Access::kRead, "array");
  const auto to = make_arrays(out, Access::kWrite, "out");
  const TensorView& from = row_major(*in);
  const TensorView& into = row_major(*to);
  const auto n = static_cast<std::size_t>(self.communicator().size());
  const auto r = static_cast<std::size_t>(self.communicator().rank());
  std::size_t sent = from.count;
  std::size_t received = from.count;
  if (!counts.empty()) {
    if (counts.size() != n * n) throw Error(ErrorCode::kValue, "counts must be a table n × n");
    sent = received = 0;
    for (std::size_t p = 0; p < n; ++p) {
      sent += counts[r * n + p];
      received += counts[p * n + r];
    }
  } else if (from.count % n != 0) {
    throw Error(ErrorCode::kValue, "all_to_all: " + std::to_string(from.count) +
                                       " elements cannot be split among " + std::to_string(n) +
                                       " ranks; pass splits=");
  }
  if (from.dtype != into.dtype || from.count != sent || into.count != received) {
    throw Error(ErrorCode::kValue, "all_to_all: expected to send " + std::to_string(sent) +
                                       " and receive " + std::to_string(received) +
                                       " elements, got arrays of " + std::to_string(from.count) +
                                       " and " + std::to_string(into.count));
  }
  check_apart(from, into);
  return self.run(
      [in, to, counts = std::move(counts)](HostCommunicator& c, const CallOptions& options) {
        c.all_to_all(only(*in), only(*to), counts, options);
      },
      keep(array, out, in->take_holder(), to->take_holder()), out, timeout_s, async);
}

py::object send(Host& self, py::handle array, int dst, double timeout_s, bool async) {
  const auto in = make_arrays(array, Access::kRead, "array");
  (void)only(*in);
  return self.run_in_lane(
      dst, true,
      [in, dst](HostCommunicator& c, const CallOptions& options) {
        c.send(only(*in), dst, options);
      },
      keep(array, in->take_holder()), array, timeout_s, async);
}

py::object recv(Host& self, py::handle array, int src, double timeout_s, bool async) {
  const auto to = make_arrays(array, Access::kWrite, "array");
  (void)only(*to);
  return self.run_in_lane(
      src, false,
      [to, src](HostCommunicator& c, const CallOptions& options) {
        c.recv(only(*to), src, options);
      },
      keep(array, to->take_holder()), array, timeout_s, async);
}

py::object barrier(Host& self, double timeout_s, bool async) {
  return self.run([](HostCommunicator& c, const CallOptions& options) { c.barrier(options); },
                  py::none(), py::none(), timeout_s, async);
}

}  // namespace

py::dict host_calls(const py::object& owner) {
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
  auto& host = owner.cast<Host&>();
  py::dict result;
  for (PyMethodDef& definition : definitions) {
    result[definition.ml_name] = bind_fast(definition, host, owner);
  }
  return result;
}

}  // namespace fastdist::bindings
