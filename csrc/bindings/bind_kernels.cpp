// Copies of memory, reads of scattered values, and the instruction set that kernels use.

#include <pybind11/pybind11.h>

#include <string>

#include "bindings/array.h"
#include "bindings/bind.h"
#include "core/error.h"
#include "host/kernels.h"

namespace py = pybind11;

namespace fastdist::bindings {

namespace {

void copy_array(py::handle dst, py::handle src, bool stream) {
  const Arrays to(dst, Access::kWrite, "dst");
  const Arrays from(src, Access::kRead, "src");
  if (to.is_list() || from.is_list()) throw Error(ErrorCode::kType, "expected one array");
  check_fits(from, to);
  const TensorView& target = to.views()[0];
  const py::gil_scoped_release release;
  host::copy(target.data, from.views()[0].data, target.bytes(), stream);
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

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("instruction_set", [] { return std::string(host::instruction_set()); });
  m.def("copy", [](py::handle dst, py::handle src) { copy_array(dst, src, false); });
  m.def("read_memory", &read_memory);
  m.def("stream_copy", [](py::handle dst, py::handle src) { copy_array(dst, src, true); });
}

}  // namespace fastdist::bindings
