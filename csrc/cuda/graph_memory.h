// Memory that belongs to graphs.
#pragma once

#include <memory>

#include "cuda/driver.h"

namespace fastdist::cuda {

// Keeps `memory`, which is on the current device, until the graph and everything made from it have
// finished running and are destroyed. The next `free_left_memory` then frees it.
void keep_with_graph(const Capture& capture, std::shared_ptr<void> memory);

// Frees the memory that ended graphs have kept on the current device. CUDA forbids API calls in the
// callback that reports a graph's end.
void free_left_memory() noexcept;

}  // namespace fastdist::cuda
