#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/array.h"
#include "bindings/bind.h"
#include "bindings/caller.h"
#include "bindings/fast_call.h"
#include "bindings/work.h"
#include "core/error.h"
#include "host/communicator.h"
#include "host/compress.h"
#include "host/machine.h"

namespace py = pybind11;

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

// One rank's communicator with its queues: collectives in one, each direction of each lane in one.
class Host {
 public:
  Host(std::shared_ptr<Machine> machine, const std::vector<int>& members, int rank,
       const std::vector<std::size_t>& offsets, std::shared_ptr<SharedBlock> block,
       const Tuning& tuning)
      : communicator_(std::move(machine), members, rank, offsets, std::move(block), tuning) {}
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  // The queues end before the communicator does; closing it makes their calls fail at once.
  ~Host() {
    communicator_.close();
    const py::gil_scoped_release release;
    lanes_.clear();
  }

  [[nodiscard]] HostCommunicator& communicator() noexcept { return communicator_; }

  // Runs `call(communicator, options)` in order: now, returning `result`; or later, returning a
  // PendingCall. `kept` holds what the call reads and writes.
  template <class Call>
  py::object run(Call call, py::handle kept, py::handle result, double timeout_s, bool async) {
    return run_in(collectives_, std::move(call), kept, result, timeout_s, async);
  }
  // Runs the call in this thread if nothing is pending before it; false if something is.
  template <class Call>
  bool run_now(Call&& call, double timeout_s) {
    return run_now_in(collectives_, call, to_duration(timeout_s));
  }
  template <class Call>
  py::object run_in_lane(int peer, bool sends, Call call, py::handle kept, py::handle result,
                         double timeout_s, bool async) {
    if (peer < 0 || peer >= communicator_.size() || peer == communicator_.rank()) {
      throw Error(ErrorCode::kValue, "the other rank must be one of 0 to " +
                                         std::to_string(communicator_.size() - 1) +
                                         " and not this one, got " + std::to_string(peer));
    }
    return run_in(lane(peer, sends), std::move(call), kept, result, timeout_s, async);
  }
  void check_root(int root) const {
    if (root >= 0 && root < communicator_.size()) return;
    throw Error(ErrorCode::kValue, "root must be one of 0 to " +
                                       std::to_string(communicator_.size() - 1) + ", got " +
                                       std::to_string(root));
  }

 private:
  WorkQueue& lane(int peer, bool sends) {
    const std::lock_guard lock(mutex_);
    return lanes_[{peer, sends}];
  }
  // Keeps what a call works on until it has ended; lets go of what earlier calls worked on.
  void keep_until_done(const std::shared_ptr<Work>& work, py::handle kept) {
    std::vector<py::object> dropped;  // may run Python code, so not under the lock
    const std::lock_guard lock(mutex_);
    while (!in_flight_.empty() && in_flight_.front().first->is_done()) {
      dropped.push_back(std::move(in_flight_.front().second));
      in_flight_.pop_front();
    }
    in_flight_.emplace_back(work, py::reinterpret_borrow<py::object>(kept));
  }
  template <class Call>
  bool run_now_in(WorkQueue& queue, Call& call, std::chrono::nanoseconds timeout) {
    const PythonCaller caller;
    const CallOptions options{timeout, &caller};
    return queue.try_run([&] { call(communicator_, options); });
  }
  template <class Call>
  py::object run_in(WorkQueue& queue, Call call, py::handle kept, py::handle result,
                    double timeout_s, bool async) {
    const std::chrono::nanoseconds timeout = to_duration(timeout_s);
    if (!async && run_now_in(queue, call, timeout)) {
      return py::reinterpret_borrow<py::object>(result);
    }
    const auto caller = std::make_shared<RecordedCaller>(python_location());
    PendingCall pending{queue.submit([this, call = std::move(call), caller, timeout] {
                          call(communicator_, CallOptions{timeout, caller.get()});
                        }),
                        py::reinterpret_borrow<py::object>(result)};
    keep_until_done(pending.work, kept);
    if (async) return py::cast(std::move(pending));
    wait_interruptibly(*pending.work, std::chrono::hours(24 * 365));
    return pending.result;
  }

  HostCommunicator communicator_;
  std::mutex mutex_;  // guards in_flight_ and the map of lanes
  std::deque<std::pair<std::shared_ptr<Work>, py::object>> in_flight_;
  WorkQueue collectives_;
  std::map<std::pair<int, bool>, WorkQueue> lanes_;
};

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

py::object broadcast(Host& self, py::handle array, int root, double timeout_s, bool async) {
  self.check_root(root);
  const bool is_root = self.communicator().rank() == root;
  const auto in = make_arrays(array, is_root ? Access::kRead : Access::kWrite, "array");
  return self.run(
      [in, root](HostCommunicator& c, const CallOptions& options) {
        c.broadcast(in->views(), root, options);
      },
      keep(array, in->take_holder()), array, timeout_s, async);
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

// An array of bytes in this rank's shared memory; the memory goes back when the array does.
py::array empty(Host& self, std::size_t bytes) {
  HostCommunicator& c = self.communicator();
  const int machine_rank = c.members()[static_cast<std::size_t>(c.rank())];
  auto* block = new std::shared_ptr<SharedBlock>(
      std::make_shared<SharedBlock>(c.machine(), machine_rank, bytes));
  const py::capsule owner(block,
                          [](void* p) { delete static_cast<std::shared_ptr<SharedBlock>*>(p); });
  return py::array(py::dtype::of<std::uint8_t>(), {bytes}, {std::size_t{1}},
                   reinterpret_cast<std::uint8_t*>((*block)->data()), owner);
}

// Every collective as a builtin bound to this communicator, by name.
py::dict calls(const py::object& owner) {
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

}  // namespace

void bind_host(py::module_& m) {
  py::class_<Tuning>(m, "Tuning")
      .def_readwrite("slot_bytes", &Tuning::slot_bytes)
      .def_readwrite("in_place_bytes", &Tuning::in_place_bytes)
      .def_readwrite("chunk_bytes", &Tuning::chunk_bytes)
      .def_readwrite("lane_bytes", &Tuning::lane_bytes)
      .def_readwrite("stream_bytes", &Tuning::stream_bytes);
  m.def("tuning_for", &host::tuning_for);

  // Big enough for the first block of every rank: peers may look at it before it is taken.
  m.def("create_segment_file", [](int ranks, const Tuning& tuning) {
    return host::create_segment_file(HostCommunicator::block_bytes(ranks, tuning)).release();
  });

  py::class_<Machine, std::shared_ptr<Machine>>(m, "Machine")
      .def_static("of_processes",
                  [](const std::vector<int>& fds, int self) {
                    std::vector<host::FileDescriptor> files;
                    for (const int fd : fds) files.emplace_back(fd);
                    return Machine::of_processes(std::move(files), self);
                  })
      .def_static("of_threads", &Machine::of_threads)
      .def_property_readonly("size", &Machine::size);

  // The part of a communicator's memory that this rank owns, in its own segment.
  py::class_<SharedBlock, std::shared_ptr<SharedBlock>>(m, "SharedBlock")
      .def(py::init(
          [](std::shared_ptr<Machine> machine, int machine_rank, int ranks, const Tuning& tuning) {
            return std::make_shared<SharedBlock>(std::move(machine), machine_rank,
                                                 HostCommunicator::block_bytes(ranks, tuning));
          }))
      .def_property_readonly("offset", &SharedBlock::offset);

  py::class_<Host>(m, "HostCommunicator")
      .def(py::init<std::shared_ptr<Machine>, const std::vector<int>&, int,
                    const std::vector<std::size_t>&, std::shared_ptr<SharedBlock>, const Tuning&>())
      .def_property_readonly("rank", [](Host& h) { return h.communicator().rank(); })
      .def_property_readonly("size", [](Host& h) { return h.communicator().size(); })
      .def_property_readonly("machine", [](Host& h) { return h.communicator().machine(); })
      .def_property_readonly("members", [](Host& h) { return h.communicator().members(); })
      .def_property_readonly("tuning", [](Host& h) { return h.communicator().tuning(); })
      .def("close", [](Host& h) { h.communicator().close(); })
      .def("empty", &empty)
      .def("calls", &calls);
}

}  // namespace fastdist::bindings
