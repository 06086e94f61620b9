// How the hosts of ranks with GPUs compare what they call: see nccl::Checker.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "nccl/engine.h"

namespace fastdist::bindings {

// By a HostCommunicator of the same ranks, in order with its own calls; or by a Python object whose
// `size` they are, and whose `agree(signature, flag, site, timeout_s)` is called with a signature's
// words. None: null. Holds `hosts`; made and destroyed under the GIL.
[[nodiscard]] std::unique_ptr<nccl::Checker> make_checker(const pybind11::object& hosts);

}  // namespace fastdist::bindings
