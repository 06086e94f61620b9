// GPUs as the driver shows them: whether CUDA can be used, and each device.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "bindings/bind.h"
#include "cuda/devices.h"
#include "cuda/driver.h"

namespace py = pybind11;

namespace fastdist::bindings {

void bind_cuda(py::module_& m) {
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

}  // namespace fastdist::bindings
