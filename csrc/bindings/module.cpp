// The module fastdist._core, put together of its parts.

#include <pybind11/pybind11.h>

#include "bindings/bind.h"

PYBIND11_MODULE(_core, m, pybind11::mod_gil_not_used()) {
  using namespace fastdist::bindings;
  bind_errors(m);
  bind_kernels(m);
  bind_work(m);
  bind_host(m);
  bind_messages(m);
  bind_recorder(m);
  bind_table(m);
  bind_cuda(m);
  bind_nccl(m);
}
