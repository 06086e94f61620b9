// Memory registered with communicators.
//
// VIRTUAL_NCCL_WINDOWS=0 simulates a system without symmetric windows, and VIRTUAL_NCCL_REFUSES=1
// one where rank 1 cannot register any.

#include <cstdio>
#include <cstdlib>
#include <string>

#include "virtual_gpu/nccl/comm.h"
#include "virtual_gpu/nccl/exported.h"

namespace virtual_nccl {
namespace {

std::mutex memory_mutex;
// An allocation by ncclMemAlloc, with the number of windows it is registered as.
std::map<void*, int>& own_memory() {
  static auto* const kMemory = new std::map<void*, int>;
  return *kMemory;
}

bool has_windows() {
  const char* text = std::getenv("VIRTUAL_NCCL_WINDOWS");
  return text == nullptr || std::atoi(text) != 0;
}

bool is_refused(int rank) {
  const char* text = std::getenv("VIRTUAL_NCCL_REFUSES");
  return text != nullptr && std::atoi(text) == rank;
}

void forget_window(void* data) {
  const std::lock_guard lock(memory_mutex);
  const auto found = own_memory().find(data);
  if (found != own_memory().end()) --found->second;
}

abi::Result register_window(const CommPtr& comm, void* data, std::size_t bytes,
                            abi::Window* window) {
  {
    const std::lock_guard lock(memory_mutex);
    const auto found = own_memory().find(data);
    if (found == own_memory().end() || !virtual_gpu::is_allocation(data, bytes, comm->device)) {
      return refuse(abi::kInvalidArgument, "a window needs memory from ncclMemAlloc");
    }
    ++found->second;
  }
  const auto sizes = exchange(*comm, bytes);
  if (sizes.empty()) forget_window(data);
  for (const std::uint64_t size : sizes) {
    if (size == bytes) continue;
    forget_window(data);
    comm->fail(abi::kInvalidUsage, "ranks disagree on a window or its size");
    return refuse(abi::kInvalidUsage, "ranks disagree on a window or its size");
  }
  if (sizes.empty()) return refuse(abi::kInternalError, "ncclCommWindowRegister was aborted");
  *window = reinterpret_cast<abi::Window>(new char);
  const std::lock_guard lock(comm->mutex);
  comm->windows[*window] = data;
  return abi::kSuccess;
}

}  // namespace

void forget_memory(RankComm& comm) {
  const std::lock_guard lock(comm.mutex);
  for (const auto& [window, data] : comm.windows) {
    forget_window(data);
    delete static_cast<char*>(window);
  }
  for (const auto& [registration, bytes] : comm.registered) delete static_cast<char*>(registration);
  comm.windows.clear();
  comm.registered.clear();
}

}  // namespace virtual_nccl

namespace virtual_nccl::exported {

abi::Result ncclMemAlloc(void** data, std::size_t bytes) {
  const cudaError_t error = cudaMalloc(data, bytes);
  if (error != cudaSuccess) return refuse(abi::kUnhandledCudaError, cudaGetErrorString(error));
  const std::lock_guard lock(memory_mutex);
  own_memory()[*data] = 0;
  return abi::kSuccess;
}

abi::Result ncclMemFree(void* data) {
  {
    const std::lock_guard lock(memory_mutex);
    const auto found = own_memory().find(data);
    if (found == own_memory().end()) {
      return refuse(abi::kInvalidArgument, "memory that is not from ncclMemAlloc");
    }
    if (found->second != 0) {
      std::fprintf(stderr, "virtual NCCL: ncclMemFree of memory that is still a window\n");
    }
    own_memory().erase(found);
  }
  const cudaError_t error = virtual_gpu::free_now(data);
  if (error != cudaSuccess) return refuse(abi::kUnhandledCudaError, cudaGetErrorString(error));
  return abi::kSuccess;
}

abi::Result ncclCommRegister(abi::Comm handle, void* data, std::size_t bytes, void** registration) {
  CommPtr comm;
  if (const abi::Result result = find_ready(handle, comm); result != abi::kSuccess) return result;
  *registration = new char;
  const std::lock_guard lock(comm->mutex);
  comm->registered[*registration] = bytes;
  (void)data;
  return abi::kSuccess;
}

abi::Result ncclCommDeregister(abi::Comm handle, void* registration) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  const std::lock_guard lock(comm->mutex);
  if (comm->registered.erase(registration) == 0) {
    return refuse(abi::kInvalidArgument, "not a registration of this communicator");
  }
  delete static_cast<char*>(registration);
  return abi::kSuccess;
}

abi::Result ncclCommWindowRegister(abi::Comm handle, void* data, std::size_t bytes,
                                   abi::Window* window, int) {
  CommPtr comm;
  if (const abi::Result result = find_ready(handle, comm); result != abi::kSuccess) return result;
  *window = nullptr;
  if (!has_windows()) return abi::kSuccess;
  if (is_refused(comm->rank)) {
    (void)exchange(*comm, bytes);
    return refuse(abi::kInvalidUsage, "this rank has no windows");
  }
  return register_window(comm, data, bytes, window);
}

abi::Result ncclCommWindowDeregister(abi::Comm handle, abi::Window window) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  // NCCL 2.28 waits for a stream of its own, which a global capture of this thread does not allow.
  cudaStream_t own = nullptr;
  if (cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) == cudaSuccess) {
    (void)cudaStreamSynchronize(own);
    (void)cudaStreamDestroy(own);
  }
  const std::lock_guard lock(comm->mutex);
  const auto found = comm->windows.find(window);
  if (found == comm->windows.end()) {
    return refuse(abi::kInvalidArgument, "not a window of this communicator");
  }
  forget_window(found->second);
  comm->windows.erase(found);
  delete reinterpret_cast<char*>(window);
  return abi::kSuccess;
}

}  // namespace virtual_nccl::exported
