// CUDA driver calls that the runtime lacks.
#pragma once

#include <optional>

#include "cuda/stream.h"

namespace fastdist::cuda {

// Makes a device's primary context current in this thread, until `pop_context`. Unlike with
// cudaSetDevice, returning to the previous device creates no context there.
void push_context(int device);
void pop_context() noexcept;

// Returns the device of an address, or nothing if it is not in the memory of a GPU. Unlike
// cudaPointerGetAttributes, this creates no context on the current device.
[[nodiscard]] std::optional<int> device_of(const void* address);

// A stream capture, unique in the process. All streams that have joined a capture share it.
using CaptureId = unsigned long long;

// Returns the capture that work on `stream` would join, if any.
[[nodiscard]] std::optional<CaptureId> capture_of(StreamHandle stream);

}  // namespace fastdist::cuda
