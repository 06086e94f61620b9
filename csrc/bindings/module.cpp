// The module fastdist._core, put together of its parts: one function per concept.

#include <pybind11/pybind11.h>

namespace fastdist::bindings {

void bind_errors(pybind11::module_& m);
void bind_host(pybind11::module_& m);
void bind_messages(pybind11::module_& m);
void bind_recorder(pybind11::module_& m);
void bind_table(pybind11::module_& m);
void bind_gpus(pybind11::module_& m);

}  // namespace fastdist::bindings

PYBIND11_MODULE(_core, m, pybind11::mod_gil_not_used()) {
  using namespace fastdist::bindings;
  bind_errors(m);
  bind_host(m);
  bind_messages(m);
  bind_recorder(m);
  bind_table(m);
  bind_gpus(m);
}
