// Work of a virtual GPU other than copies: kernels, and the calls of the virtual NCCL.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>

#define VIRTUAL_GPU_API __attribute__((visibility("default")))

namespace virtual_gpu {

// Orders the calls of a communicator, across streams and graphs.
struct Chain;
[[nodiscard]] VIRTUAL_GPU_API std::shared_ptr<Chain> make_chain();

// Thrown by work that would fail on a real GPU. The device is lost afterwards: nothing runs any
// more, and every later call of the runtime returns `error`.
struct VIRTUAL_GPU_API Failure : std::runtime_error {
  Failure(cudaError_t error, const std::string& what) : std::runtime_error(what), error(error) {}
  cudaError_t error;
};

// Enqueues `run` on a stream of `device` (null: its legacy default stream). If the stream is being
// captured, appends `run` to the graph, to run once per launch.
[[nodiscard]] VIRTUAL_GPU_API cudaError_t enqueue(cudaStream_t stream, int device,
                                                  std::function<void()> run,
                                                  const std::shared_ptr<Chain>& chain = nullptr);

// Waits until all work of a chain has ended, or the device is lost.
VIRTUAL_GPU_API void wait_for(const std::shared_ptr<Chain>& chain);
// Waits until no graph contains work of a chain.
VIRTUAL_GPU_API void wait_for_graphs(const std::shared_ptr<Chain>& chain);

// Throws Failure unless the bytes are allocated memory of `device`.
VIRTUAL_GPU_API void check_memory(const void* data, std::size_t bytes, int device);
// Returns true if an allocation of `device` with at least `bytes` bytes begins at `data`.
[[nodiscard]] VIRTUAL_GPU_API bool is_allocation(const void* data, std::size_t bytes, int device);

// Frees memory without waiting for the device, as ncclMemFree does.
[[nodiscard]] VIRTUAL_GPU_API cudaError_t free_now(void* data);

// Returns true if this process has used memory of a device, as making it current does.
extern "C" VIRTUAL_GPU_API int virtual_gpu_has_context(int device);

// Returns the bytes that this process has allocated on a device.
extern "C" VIRTUAL_GPU_API unsigned long virtual_gpu_bytes_in_use(int device);

// The byte values that fill fresh and freed memory.
inline constexpr unsigned char kFresh = 0xCB;
inline constexpr unsigned char kFreed = 0xDD;

}  // namespace virtual_gpu
