// The calls of CUDA's driver that its runtime lacks.
#pragma once

#include <optional>

#include "cuda/stream.h"

struct CUgraph_st;

namespace fastdist::cuda {

// Makes a device's primary context current in this thread, until `pop_context`. Unlike
// cudaSetDevice, going back makes no context on the device that was current before.
void push_context(int device);
void pop_context() noexcept;

// Returns the device of an address, or nothing if it is not in the memory of a GPU. Unlike
// cudaPointerGetAttributes, this makes no context on the current device.
[[nodiscard]] std::optional<int> device_of(const void* address);

// A capture under way. Streams that have joined it share it.
struct Capture {
  unsigned long long id;  // no other capture of the process has it
  CUgraph_st* graph;
};

// Returns the capture that work on `stream` would become a part of, if any.
[[nodiscard]] std::optional<Capture> capture_of(StreamHandle stream);

}  // namespace fastdist::cuda
