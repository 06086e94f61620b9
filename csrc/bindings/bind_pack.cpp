#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/array.h"
#include "bindings/bind.h"
#include "bindings/call_arguments.h"
#include "bindings/gpu.h"
#include "cuda/packed_list.h"

namespace py = pybind11;

namespace fastdist::bindings {
namespace {

// A packed list with references to its arrays.
struct PackedArrays {
  std::unique_ptr<cuda::PackedList> list;
  py::object arrays;
  py::object holder;
};

PackedArrays make_packed(const py::object& arrays, int device, const py::object& compress,
                         std::size_t bucket_bytes) {
  Arrays list(arrays, Access::kWrite, "arrays", Placement{device});
  const auto wire = compress.is_none() ? std::nullopt : std::optional(to_wire_dtype(compress));
  const std::vector<TensorView> views(list.views().begin(), list.views().end());
  auto made = [&] {
    const py::gil_scoped_release release;
    return cuda::make_packed_list(views, wire, bucket_bytes, device);
  }();
  return {std::move(made), arrays, list.take_holder()};
}

// Launches may block until the device's queue has room.
void pack(PackedArrays& self, const py::object& stream) {
  auto* const handle = from_python<StreamArgument>(stream.ptr()).handle;
  const py::gil_scoped_release release;
  self.list->pack(handle);
}

void unpack(PackedArrays& self, const py::object& stream) {
  auto* const handle = from_python<StreamArgument>(stream.ptr()).handle;
  const py::gil_scoped_release release;
  self.list->unpack(handle);
}

}  // namespace

void bind_pack(py::module_& m) {
  py::class_<PackedArrays>(m, "PackedList")
      .def(py::init(&make_packed))
      .def_property_readonly("nbytes", [](const PackedArrays& p) { return p.list->bytes(); })
      .def("pack", &pack)
      .def("unpack", &unpack);
}

}  // namespace fastdist::bindings
