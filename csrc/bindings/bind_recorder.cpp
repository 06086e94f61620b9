// Records of this process's calls and requests, for other processes.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bindings/caller.h"
#include "core/recorder.h"

namespace fastdist::bindings {

void bind_recorder(py::module_& m) {
  m.def("start_recorder", &recorder::start, py::arg("path"), py::kw_only(), py::arg("rank"),
        py::arg("world_size"), py::arg("version"), py::arg("job"), py::arg("host"),
        py::arg("program"), py::arg("task"));
  m.def("set_recorded_job", &recorder::set_job);
  m.def("open_requests", [](int servers) {
    return recorder::open_communicator(0, servers, 0, "ps").value_or(recorder::kCommunicators);
  });
  m.def("begin_request", [](std::uint16_t client, int server, unsigned op, std::uint64_t bytes) {
    if (client == recorder::kCommunicators) return std::uint64_t{0};
    return recorder::begin_request(client, server, op, bytes, python_site());
  });
  m.def("end_request", &recorder::end_request);
  m.def("close_requests", [](std::uint16_t client) {
    if (client < recorder::kCommunicators) recorder::close_communicator(client);
  });
  m.def("set_speaker", &set_speaker);
  m.def("answer_from_thread", &answer_from_thread);
  m.def("recorded_job", [] {
    const recorder::File* const file = recorder::file.load();
    return file == nullptr ? std::string() : std::string(file->header.job.data());
  });
  m.def("ticks", &recorder::ticks);
  m.def("set_phase", &recorder::set_phase);
  m.def("end_phase", &recorder::end_phase);
}

}  // namespace fastdist::bindings
