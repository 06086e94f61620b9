// GPUs: the devices as the driver shows them, NCCL, its communicators and their pending calls.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/checker.h"
#include "bindings/endpoint.h"
#include "bindings/gpu.h"
#include "bindings/group.h"
#include "bindings/make_call.h"
#include "core/error.h"
#include "cuda/devices.h"
#include "cuda/driver.h"
#include "nccl/library.h"

namespace fastdist::bindings {
namespace {

using nccl::Library;
using namespace py::literals;

auto without_gil(py::handle timeout, const auto& call) {
  const PythonCaller caller;
  const CallOptions options{to_duration(timeout), &caller};
  caller.may_block();
  return call(options);
}

std::shared_ptr<Gpu> connect_gpu(const py::bytes& id, int rank, int size, int device,
                                 const py::object& host, const py::object& timeout,
                                 const std::optional<std::pair<int, int>>& lane) {
  const std::string bytes = id;
  auto checker = host.is_none() ? nullptr : std::make_unique<HostChecker>(host);
  nccl::Connection connection{{}, rank, size, device, checker.get(), std::nullopt};
  if (lane) connection.lane = {lane->first, lane->second};
  if (bytes.size() != sizeof(connection.id.bytes)) {
    refuse(ErrorCode::kValue, "id must come from new_nccl_id (128 bytes), got ", bytes.size(),
           " bytes");
  }
  std::memcpy(connection.id.bytes.data(), bytes.data(), bytes.size());
  auto made = without_gil(
      timeout, [&](const CallOptions& options) { return nccl::connect(connection, options); });
  return made ? std::make_shared<Gpu>(std::move(made), std::move(checker)) : nullptr;
}

// Device memory. Freeing it waits for the device.
struct GpuMemory {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes;
  int device;
};

GpuMemory allocate(Gpu& self, std::size_t bytes, const py::object& timeout) {
  auto memory = without_gil(timeout, [&](const CallOptions& options) {
    return self.communicator().allocate(bytes, options);
  });
  auto* const made = memory.get();
  // Waiting for the device may mean waiting for another rank, whose thread may need the GIL.
  const auto free = [memory = std::move(memory)](std::byte*) mutable {
    const GilRelease release;
    memory.reset();
  };
  return {{made, free}, bytes, self.communicator().device()};
}

// Version 3 of the CUDA array interface, which torch.as_tensor and cupy.asarray accept without a
// copy.
py::dict array_interface(const GpuMemory& memory) {
  const auto data = reinterpret_cast<std::uintptr_t>(memory.memory.get());
  return py::dict("shape"_a = py::make_tuple(memory.bytes), "typestr"_a = "|u1",
                  "data"_a = py::make_tuple(data, /*read_only=*/false), "strides"_a = py::none(),
                  "stream"_a = py::none(), "version"_a = 3);
}

bool is_compared(const GpuWork& work) { return !work.comparison || work.comparison->is_done(); }

// Blocks the host. Comparisons have timeouts of their own.
void wait_until_compared(const GpuWork& work) {
  constexpr std::chrono::milliseconds kBetweenLooks{50};
  if (is_compared(work)) return;
  work.owner->check_usable();
  work.owner->hurry();
  while (!is_compared(work) && !wait_interruptibly(*work.comparison, kBetweenLooks)) {
    work.owner->check_usable();
  }
}

// Makes `stream` wait. If `compared`, the host waits until the ranks have compared the call: if
// they made different calls, this rank's result must not be used.
py::object wait_on_stream(const GpuWork& work, const py::object& stream, bool compared) {
  if (compared) wait_until_compared(work);
  work.owner->check_usable();
  const nccl::StreamHandle waiting = to_stream(stream);
  work.mark->make_wait(waiting);
  if (waiting == work.from) work.owner->release(work.mark.get());
  return work.result;
}

// Blocks the host until the call has ended. If it takes too long, the watcher aborts it and this
// function throws the watcher's error.
py::object synchronize(const GpuWork& work, const py::object& timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kLongestPause{500};
  const auto limit =
      timeout.is_none() ? std::chrono::nanoseconds::max() : to_duration(timeout, true);
  const auto start = Clock::now();
  std::chrono::microseconds pause{5};
  while (!Gpu::is_over(*work.mark) || !is_compared(work)) {
    work.owner->check_usable();
    if (Clock::now() - start >= limit) throw_unfinished(timeout);
    {
      const GilRelease release;
      std::this_thread::sleep_for(pause);
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    pause = std::min(pause * 2, kLongestPause);
  }
  work.owner->release(work.mark.get());
  work.owner->check_usable();
  return work.result;
}

void bind_devices(py::module_& m) {
  py::class_<cuda::DeviceFacts>(m, "Device")
      .def_readonly("name", &cuda::DeviceFacts::name)
      .def_readonly("uuid", &cuda::DeviceFacts::uuid)
      .def_readonly("pci", &cuda::DeviceFacts::pci)
      .def_readonly("major", &cuda::DeviceFacts::major)
      .def_readonly("minor", &cuda::DeviceFacts::minor)
      .def_readonly("multiprocessors", &cuda::DeviceFacts::multiprocessors)
      .def_readonly("bytes", &cuda::DeviceFacts::bytes);
  m.def("cuda_is_built", &cuda::is_built);
  m.def("cuda_runtime_version", &cuda::runtime_version);
  m.def("cuda_driver_version", &cuda::driver_version);
  m.def("why_no_cuda", &cuda::why_unusable);
  m.def("cuda_devices", &cuda::devices);
  m.def("cuda_device_of", [](std::uintptr_t address) {
    return cuda::device_of(reinterpret_cast<const void*>(address));
  });
}

void bind_library(py::module_& m) {
  py::class_<Library>(m, "NcclLibrary")
      .def_readonly("path", &Library::path)
      .def_readonly("version", &Library::version)
      .def_property_readonly("version_text",
                             [](const Library& l) { return nccl::version_text(l.version); });
  m.def(
      "load_nccl",
      [](const std::vector<std::string>& candidates) -> const Library& {
        const py::gil_scoped_release release;
        return nccl::load_library(candidates);
      },
      py::return_value_policy::reference);
  m.def("nccl_settings_for_sharing", &nccl::settings_for_sharing);
  m.def("new_nccl_id", [] {
    const auto id = nccl::make_unique_id();
    return py::bytes(id.bytes.data(), id.bytes.size());
  });
}

void bind_arrays(py::module_& m) {
  py::class_<nccl::Mark, std::shared_ptr<nccl::Mark>>(m, "GpuMark");
  py::class_<GpuWork>(m, "GpuWork")
      .def("is_done", [](const GpuWork& work) { return Gpu::is_over(*work.mark); })
      .def("is_enqueued", [](const GpuWork&) { return true; })  // unlike calls that connect first
      .def_property_readonly(
          "stream",
          [](const GpuWork& work) {
            return reinterpret_cast<std::uintptr_t>(work.owner->communicator().own_stream());
          })
      .def("wait", &wait_on_stream, py::arg("stream"), py::kw_only(), py::arg("compared") = true)
      .def("synchronize", &synchronize, py::arg("timeout") = py::none());
  py::class_<GpuMemory>(m, "GpuMemory")
      .def_readonly("nbytes", &GpuMemory::bytes)
      .def_readonly("device", &GpuMemory::device)
      .def_property_readonly("__cuda_array_interface__", &array_interface);
  py::class_<Router>(m, "Router")
      .def(py::init<py::object, py::object, py::object, py::object>())
      .def("connect", &Router::connect)
      .def("calls", &bind_calls<Router>);
  py::class_<Group>(m, "Group")
      .def(py::init<py::object, py::object>())
      .def("calls", &bind_calls<Group>)
      .def("on_gpu", &Group::on_gpu)
      .def("run_on_gpu", &Group::run_on_gpu)
      .def("run_on_hosts", &Group::run_on_hosts);
  m.def("current_stream", [](const py::object& arrays, int gpu) -> py::object {
    const auto stream = current_stream(arrays, gpu);
    if (!stream) return py::none();
    return py::int_(reinterpret_cast<std::uintptr_t>(*stream));
  });
}

void bind_communicator(py::module_& m) {
  py::class_<Gpu, std::shared_ptr<Gpu>>(m, "NcclCommunicator")
      .def_static("connect", &connect_gpu, py::arg("id"), py::arg("rank"), py::arg("size"),
                  py::arg("device"), py::arg("hosts"), py::arg("timeout"),
                  py::arg("lane") = py::none())
      .def_property_readonly(
          "own_stream",
          [](Gpu& g) { return reinterpret_cast<std::uintptr_t>(g.communicator().own_stream()); })
      .def("record",
           [](Gpu& g, const py::object& stream) {
             return g.communicator().record(to_stream(stream));
           })
      .def("follow",
           [](Gpu& g, const nccl::Mark& point) { point.make_wait(g.communicator().own_stream()); })
      .def("share_failures",
           [](Gpu& g, Gpu& other) { g.communicator().share_failures(other.communicator()); })
      .def_property_readonly("device", [](Gpu& g) { return g.communicator().device(); })
      .def("calls", &bind_calls<Gpu>)
      .def("keep_for_last", &Gpu::keep_for_last)
      .def("allocate", &allocate)
      .def("abort",
           [](Gpu& g, const std::string& why) {
             const GilRelease release;
             g.communicator().abort(why);
           })
      .def("close", &Gpu::close);
}

}  // namespace

void bind_gpus(py::module_& m) {
  bind_devices(m);
  bind_library(m);
  bind_arrays(m);
  bind_communicator(m);
}

}  // namespace fastdist::bindings
