// CUDA driver calls that the runtime lacks.
#pragma once

#include <optional>

#include "cuda/stream.h"

struct CUgraph_st;

namespace fastdist::cuda {

// Makes a device's primary context current in this thread, until `pop_context`. Unlike with
// cudaSetDevice, returning to the previous device creates no context there.
void push_context(int device);
void pop_context() noexcept;

// Returns the device of an address, or nothing if it is not in the memory of a GPU. Unlike
// cudaPointerGetAttributes, this creates no context on the current device.
[[nodiscard]] std::optional<int> device_of(const void* address);

// A stream capture in progress. All streams that have joined a capture share it.
struct Capture {
  unsigned long long id;  // unique among the process's captures
  CUgraph_st* graph;
};

// Returns the capture that work on `stream` would join, if any.
[[nodiscard]] std::optional<Capture> capture_of(StreamHandle stream);

}  // namespace fastdist::cuda
