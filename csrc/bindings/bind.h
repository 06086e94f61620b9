// One registration function per concept; module.cpp calls all of them.
#pragma once

#include <pybind11/pybind11.h>

namespace fastdist::bindings {

void bind_errors(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_work(pybind11::module_& m);
void bind_messages(pybind11::module_& m);
void bind_host(pybind11::module_& m);
void bind_recorder(pybind11::module_& m);
void bind_table(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_nccl(pybind11::module_& m);

// Sets the Python error for the exception being handled. Must be called in a catch block.
void translate_exception();

}  // namespace fastdist::bindings
