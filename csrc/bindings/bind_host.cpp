#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/host.h"
#include "host/machine.h"
#include "host/tuning.h"

namespace fastdist::bindings {
namespace {

using host::Machine;
using host::SharedBlock;
using host::Tuning;

// Returns an array of bytes in this rank's shared memory, which is freed with the array.
py::array empty(Host& self, std::size_t bytes) {
  HostCommunicator& c = self.communicator();
  c.check_usable();
  const int machine_rank = c.members()[static_cast<std::size_t>(c.rank())];
  auto* block = new std::shared_ptr<SharedBlock>(
      std::make_shared<SharedBlock>(c.machine(), machine_rank, bytes));
  const py::capsule owner(block,
                          [](void* p) { delete static_cast<std::shared_ptr<SharedBlock>*>(p); });
  return py::array(py::dtype::of<std::uint8_t>(), {bytes}, {std::size_t{1}},
                   reinterpret_cast<std::uint8_t*>((*block)->data()), owner);
}

}  // namespace

void bind_host(py::module_& m) {
  py::class_<Tuning>(m, "Tuning");
  m.def("begin_exit", &begin_exit);
  m.def("is_exiting", &is_exiting);
  m.def("tuning_for", &host::tuning_for);

  // The file holds each rank's first block, since peers may read the block before it is allocated.
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
      .def_static("of_threads", &Machine::of_threads);

  // The part of a communicator's shared memory that this rank owns.
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
      .def_property_readonly("dead_rank", [](Host& h) { return h.communicator().find_dead(); })
      .def("watch", &Host::set_watch)
      .def("close", [](Host& h) { h.communicator().close(); })
      .def("empty", &empty)
      .def("calls", &host_calls);
}

}  // namespace fastdist::bindings
