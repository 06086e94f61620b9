// What runs on a virtual GPU besides copies: kernels, and the calls of the virtual NCCL.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <stdexcept>

#define VIRTUAL_GPU_API __attribute__((visibility("default")))

namespace virtual_gpu {

// Orders works among themselves, whatever their streams are and also where some are in graphs: the
// calls of a communicator.
struct Chain;
[[nodiscard]] VIRTUAL_GPU_API std::shared_ptr<Chain> make_chain();

// Thrown by a work that a real GPU would have failed in. The device is lost then: nothing runs any
// more, and every later call of the runtime returns `error`.
struct VIRTUAL_GPU_API Failure : std::runtime_error {
  Failure(cudaError_t error, const std::string& what) : std::runtime_error(what), error(error) {}
  cudaError_t error;
};

// Enqueues `run` on a stream of `device` (null: its legacy default stream), or appends it to the
// graph that is being captured there: then it runs once per launch.
[[nodiscard]] VIRTUAL_GPU_API cudaError_t enqueue(cudaStream_t stream, int device,
                                                  std::function<void()> run,
                                                  const std::shared_ptr<Chain>& chain = nullptr);

// Waits until all works of a chain have ended, or the device is lost.
VIRTUAL_GPU_API void wait_for(const std::shared_ptr<Chain>& chain);
// Waits until no graph holds a work of a chain.
VIRTUAL_GPU_API void wait_for_graphs(const std::shared_ptr<Chain>& chain);

// Throws Failure unless these bytes are allocated memory of `device`.
VIRTUAL_GPU_API void check_memory(const void* data, std::size_t bytes, int device);
// Whether an allocation of `device` begins here and has at least so many bytes.
[[nodiscard]] VIRTUAL_GPU_API bool is_allocation(const void* data, std::size_t bytes, int device);

// cudaFree that does not wait for the device, as what ncclMemFree does.
[[nodiscard]] VIRTUAL_GPU_API cudaError_t free_now(void* data);

// Whether this process has taken memory of a device, as one that makes it current does.
extern "C" VIRTUAL_GPU_API int virtual_gpu_has_context(int device);

// What fresh and freed memory is filled with.
inline constexpr unsigned char kFresh = 0xCB;
inline constexpr unsigned char kFreed = 0xDD;

}  // namespace virtual_gpu
