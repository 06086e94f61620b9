#include "cuda/graph_memory.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/check.h"

namespace fastdist::cuda {
namespace {

struct Left {
  std::mutex mutex;
  std::map<int, std::vector<std::shared_ptr<void>>> by_device;
};

// Never destroyed: graphs may end after static objects.
Left& left() {
  static auto* const kLeft = new Left;
  return *kLeft;
}

int current_device() {
  int device = 0;
  FASTDIST_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

struct Kept {
  int device;
  std::shared_ptr<void> memory;
};

// CUDA calls this in one of its own threads.
void note_end(void* argument) {
  const std::unique_ptr<Kept> kept(static_cast<Kept*>(argument));
  const std::lock_guard lock(left().mutex);
  left().by_device[kept->device].push_back(std::move(kept->memory));
}

}  // namespace

void keep_with_graph(const Capture& capture, std::shared_ptr<void> memory) {
  auto kept = std::make_unique<Kept>(Kept{current_device(), std::move(memory)});
  cudaUserObject_t object = nullptr;
  FASTDIST_CUDA_CHECK(
      cudaUserObjectCreate(&object, kept.get(), &note_end, 1, cudaUserObjectNoDestructorSync));
  (void)kept.release();  // the object owns it
  const cudaError_t error =
      cudaGraphRetainUserObject(capture.graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) (void)cudaUserObjectRelease(object, 1);
  check(error, "cudaGraphRetainUserObject");
}

void free_left_memory() noexcept {
  std::vector<std::shared_ptr<void>> freed;  // after the lock is released
  try {
    const std::lock_guard lock(left().mutex);
    if (!left().by_device.empty()) freed.swap(left().by_device[current_device()]);
  } catch (...) {  // the next call frees it
  }
}

}  // namespace fastdist::cuda
