// Comparison of the calls of GPU ranks through their hosts; see nccl::Checker.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "nccl/engine.h"

namespace fastdist::bindings {

// Makes a checker from a communicator of the same ranks on host memory: its comparisons are ordered
// with its own calls. Returns null for None. The checker holds `hosts`; create and destroy it with
// the GIL held.
[[nodiscard]] std::unique_ptr<nccl::Checker> make_checker(const pybind11::object& hosts);

}  // namespace fastdist::bindings
