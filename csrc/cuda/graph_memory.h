// Memory that belongs to graphs.
#pragma once

#include <memory>

#include "cuda/driver.h"

namespace fastdist::cuda {

// Keeps `memory`, which is of the current device, until the graph and all that was made of it are
// gone and have run. It is freed by the next `free_left_memory` then.
void keep_with_graph(const Capture& capture, std::shared_ptr<void> memory);

// Frees what ended graphs of the current device have kept: CUDA may not be called where it tells of
// their end.
void free_left_memory() noexcept;

}  // namespace fastdist::cuda
