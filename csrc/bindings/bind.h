// One function per concept; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace fastdist::bindings {

void bind_errors(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_work(pybind11::module_& m);
void bind_host(pybind11::module_& m);
void bind_table(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_nccl(pybind11::module_& m);
void bind_pack(pybind11::module_& m);

// Inside a catch block: sets the Python error that the exception stands for.
void translate_exception();

}  // namespace fastdist::bindings
