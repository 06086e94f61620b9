// Communicators between ranks of one machine and of several, their pending calls, a machine's
// shared memory, and what kernels do with memory.

#include <pybind11/critical_section.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/array.h"
#include "bindings/caller.h"
#include "bindings/endpoint.h"
#include "bindings/make_call.h"
#include "core/echo.h"
#include "core/error.h"
#include "core/file_descriptor.h"
#include "host/communicator.h"
#include "host/kernels.h"
#include "host/machine.h"
#include "host/tuning.h"
#include "net/communicator.h"

namespace fastdist::bindings {

bool wait_interruptibly(Work& work, std::chrono::nanoseconds timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(50);
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const std::chrono::nanoseconds left = deadline - Clock::now();
    {
      const GilRelease release;
      if (work.wait(std::clamp(left, std::chrono::nanoseconds(0), kSlice))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (left <= kSlice) return false;
  }
}

void throw_unfinished(py::handle timeout) {
  refuse(ErrorCode::kTimeout, "the call has not finished after ",
         py::str(timeout).cast<std::string>(), " s; it is still running, wait again");
}

namespace {

using host::HostCommunicator;
using host::Machine;
using host::SharedBlock;
using host::Tuning;

// Returns an array of bytes in memory that the communicator can use in place.
py::array empty(Endpoint& self, std::size_t bytes) {
  using Memory = std::shared_ptr<std::byte>;
  auto owner = std::make_unique<Memory>(self.communicator().allocate(bytes));
  auto* const data = reinterpret_cast<std::uint8_t*>(owner->get());
  const py::capsule capsule(owner.release(), [](void* p) { delete static_cast<Memory*>(p); });
  return py::array(py::dtype::of<std::uint8_t>(), {bytes}, {std::size_t{1}}, data, capsule);
}

// An Endpoint whose communicator is known by its type.
template <class C>
struct EndpointOf : Endpoint {
  explicit EndpointOf(std::shared_ptr<C> made) : Endpoint(made), engine(std::move(made)) {}

  const std::shared_ptr<C> engine;
};
using HostEndpoint = EndpointOf<HostCommunicator>;     // ranks of one machine
using NetEndpoint = EndpointOf<net::NetCommunicator>;  // ranks of several machines

// Compares a call that another engine makes, or that is made of others, with the calls of all
// ranks. `list`: a hash of several arrays, or the shape of one.
void compare(Endpoint& self, const std::string& op, const std::string& dtype,
             const std::string& reduce_op, int root, std::uint64_t count,
             const std::variant<std::uint64_t, std::vector<std::int64_t>>& list,
             py::handle timeout) {
  Signature signature{.root = static_cast<std::int16_t>(root), .count = count};
  if (const auto* const hash = std::get_if<std::uint64_t>(&list)) {
    signature.list = *hash == 0 ? 0 : *hash << 32 | 1;  // no shapes, see `list_word`
  } else {
    signature.list = shape_word(std::get<1>(list));
  }
  const auto known_dtype = dtype_from_name(dtype);
  const auto known_reduce_op = reduce_op_from_name(reduce_op);
  const auto known_op = op_from_name(op);
  if (!known_dtype) {
    refuse(ErrorCode::kType, "array has a dtype that collectives do not support: ", dtype);
  }
  if (!known_reduce_op || !known_op) {
    refuse(ErrorCode::kValue, "unknown call: ", op, ", ", dtype, ", ", reduce_op);
  }
  signature.dtype = *known_dtype;
  signature.reduce_op = *known_reduce_op;
  signature.op = *known_op;
  const auto patience = to_duration(timeout);
  const PythonCaller caller;
  caller.may_block();
  self.run_without_gil(
      [&](BlockingCommunicator& c, CallOptions each) {
        each.whole = &signature;
        c.barrier(each);
      },
      {patience, &caller});
}

// Takes the connections to each rank: their file descriptors `out`, `in` and `stream`, or -1.
// `parent`: a communicator of more ranks whose measured links are used, or None.
std::unique_ptr<NetEndpoint> make_net(const HostEndpoint& inner, int rank,
                                      const std::vector<std::pair<int, std::string>>& places,
                                      const std::vector<std::array<int, 3>>& fds,
                                      const NetEndpoint* parent, py::handle silence,
                                      py::handle timeout) {
  std::vector<net::Place> known;
  for (const auto& [machine, ip] : places) known.push_back({machine, ip});
  std::vector<net::Connections> connections;
  for (const auto& [out, in, stream] : fds) {
    connections.push_back({FileDescriptor(out), FileDescriptor(in), FileDescriptor(stream)});
  }
  const auto patience = to_duration(timeout);
  const PythonCaller caller;
  caller.may_block();
  const auto made = std::make_shared<net::NetCommunicator>(inner.engine, rank, std::move(known),
                                                           std::move(connections));
  if (parent != nullptr) {
    made->set_links(parent->engine->links());
  } else {
    made->measure_links({patience, &caller});
  }
  made->set_patience(
      std::chrono::duration_cast<std::chrono::milliseconds>(to_duration(silence, true)));
  return std::make_unique<NetEndpoint>(made);
}

// Copies past the caches.
void stream_copy(py::handle dst, py::handle src) {
  const Arrays to(dst, Access::kWrite, "dst");
  const Arrays from(src, Access::kRead, "src");
  if (to.is_list() || from.is_list()) throw Error(ErrorCode::kType, "expected one array");
  check_fits(from, to);
  const TensorView& target = to.views()[0];
  const py::gil_scoped_release release;
  host::copy(target.data, from.views()[0].data, target.bytes(), true);
}

// Returns the bytes at some addresses one after another, as `sizes` says of each.
py::bytes read_memory(const py::list& addresses, const py::list& sizes) {
  std::string found;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const void* const address = PyLong_AsVoidPtr(addresses[i].ptr());
    if (address == nullptr) throw Error(ErrorCode::kValue, "an address must not be null");
    found.append(static_cast<const char*>(address), sizes[i].cast<std::size_t>());
  }
  return found;
}

void bind_machine(py::module_& m) {
  // The file holds each rank's first block, since peers may read the block before it is allocated.
  m.def("create_segment_file", [](int ranks, const Tuning& tuning) {
    return host::create_segment_file(HostCommunicator::block_bytes(ranks, tuning)).release();
  });

  py::class_<Machine, std::shared_ptr<Machine>>(m, "Machine")
      .def_static("of_processes",
                  [](const std::vector<int>& fds, int self) {
                    std::vector<FileDescriptor> files;
                    for (const int fd : fds) files.emplace_back(fd);
                    return std::make_shared<Machine>(std::move(files), self);
                  })
      .def_static("of_threads", &Machine::of_threads);

  // This rank's own block of a communicator's shared memory.
  py::class_<SharedBlock, std::shared_ptr<SharedBlock>>(m, "SharedBlock")
      .def(py::init(
          [](std::shared_ptr<Machine> machine, int machine_rank, int ranks, const Tuning& tuning) {
            return std::make_shared<SharedBlock>(std::move(machine), machine_rank,
                                                 HostCommunicator::block_bytes(ranks, tuning));
          }))
      .def_property_readonly("offset", &SharedBlock::offset);
}

void bind_work(py::module_& m) {
  py::class_<PendingCall>(m, "Work")
      .def("is_done", [](const PendingCall& call) { return call.work->is_done(); })
      .def(
          "wait",
          [](const py::object& self, const py::object& timeout) {
            const auto& call = self.cast<const PendingCall&>();
            const auto limit =
                timeout.is_none() ? std::chrono::hours(24 * 365) : to_duration(timeout, true);
            if (!wait_interruptibly(*call.work, limit)) throw_unfinished(timeout);
            const py::scoped_critical_section one_thread(self);
            *call.kept = py::none();
            return call.result;
          },
          py::arg("timeout") = py::none());
}

}  // namespace

void bind_host(py::module_& m) {
  bind_work(m);
  py::class_<Tuning>(m, "Tuning");
  m.def("begin_exit", &begin_exit);
  m.def("echo", [](int connected) { echo(FileDescriptor(connected)); });
  m.def("tuning_for", &host::tuning_for);
  m.def("instruction_set", &host::instruction_set);
  m.def("read_memory", &read_memory);
  m.def("stream_copy", &stream_copy);
  bind_machine(m);

  py::class_<Endpoint>(m, "Communicator")
      .def_property_readonly("rank", [](Endpoint& e) { return e.communicator().rank(); })
      .def_property_readonly("size", [](Endpoint& e) { return e.communicator().size(); })
      .def("finish", &Endpoint::finish)
      .def("record", &Endpoint::record)
      .def("close", [](Endpoint& e) { e.communicator().close(); })
      .def("check_usable", [](Endpoint& e) { e.communicator().check_usable(); })
      .def("compare", &compare)
      .def("empty", &empty)
      .def("calls", &bind_calls<Endpoint>);

  py::class_<HostEndpoint, Endpoint>(m, "HostCommunicator")
      .def(py::init([](std::shared_ptr<Machine> machine, const std::vector<int>& members, int rank,
                       const std::vector<std::size_t>& offsets, std::shared_ptr<SharedBlock> block,
                       const Tuning& tuning) {
        return std::make_unique<HostEndpoint>(std::make_shared<HostCommunicator>(
            std::move(machine), members, rank, offsets, std::move(block), tuning));
      }))
      .def("find_dead", [](HostEndpoint& e) { return e.engine->find_dead(); })
      .def_property_readonly("machine", [](HostEndpoint& e) { return e.engine->machine(); })
      .def_property_readonly("members", [](HostEndpoint& e) { return e.engine->members(); })
      .def_property_readonly("tuning", [](HostEndpoint& e) { return e.engine->tuning(); });

  py::class_<NetEndpoint, Endpoint>(m, "NetCommunicator")
      .def(py::init(&make_net), py::keep_alive<1, 2>())
      .def("find_lost", [](NetEndpoint& e) { return e.engine->find_lost(); });
}

}  // namespace fastdist::bindings
