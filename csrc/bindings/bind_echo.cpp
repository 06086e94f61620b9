#include <pybind11/pybind11.h>

#include "bindings/bind.h"
#include "core/echo.h"
#include "core/file_descriptor.h"

namespace fastdist::bindings {

void bind_echo(pybind11::module_& m) {
  m.def("echo", [](int connected) { echo(FileDescriptor(connected)); });
}

}  // namespace fastdist::bindings
