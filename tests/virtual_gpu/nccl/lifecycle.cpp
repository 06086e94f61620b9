// Creation and destruction of communicators.

#include <cstdlib>
#include <string>
#include <string_view>

#include "virtual_gpu/nccl/comm.h"
#include "virtual_gpu/nccl/exported.h"

namespace virtual_nccl {
namespace {

abi::Result check_config(const abi::Config* config) {
  if (config == nullptr) return abi::kSuccess;
  if (config->magic != 0xCAFEBEEF || config->size < sizeof(abi::Config)) {
    return refuse(abi::kInvalidArgument, "the configuration was not initialized");
  }
  return abi::kSuccess;
}

// NCCL's variable for this overrules the configuration.
bool is_blocking(const abi::Config* config) {
  if (const char* set = std::getenv("NCCL_COMM_BLOCKING")) return std::string_view(set) != "0";
  return config == nullptr || config->blocking != 0;
}

// Joins `comm` to its ranks. A non-blocking one, which can only be aborted here, does not connect.
abi::Result connect(const CommPtr& comm, abi::Comm* handle, bool is_blocking) {
  const abi::Result result = is_blocking ? join(comm) : abi::kInProgress;
  if (result == abi::kSuccess || !is_blocking) *handle = make_handle(comm);
  return result;
}

void stop_running(RankComm& comm) {
  // A running call sees the flag that was set and releases the lock.
  const std::lock_guard lock(comm.running);
}

}  // namespace
}  // namespace virtual_nccl

namespace virtual_nccl::exported {

abi::Result ncclGetVersion(int* out) {
  *out = version();
  return abi::kSuccess;
}

abi::Result ncclGetUniqueId(abi::UniqueId* id) {
  const std::string name = Segment::create();
  if (name.empty()) return refuse(abi::kSystemError, "shared memory could not be created");
  id->bytes.fill('\0');
  name.copy(id->bytes.data(), id->bytes.size() - 1);
  return abi::kSuccess;
}

abi::Result ncclCommInitRankConfig(abi::Comm* handle, int size, abi::UniqueId id, int rank,
                                   abi::Config* config) {
  *handle = nullptr;
  if (const abi::Result result = check_config(config); result != abi::kSuccess) return result;
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) {
    return refuse(abi::kInvalidArgument, "rank " + std::to_string(rank) + " of " +
                                             std::to_string(size) + "; at most " +
                                             std::to_string(kMostRanks) + " are supported");
  }
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return refuse(abi::kUnhandledCudaError, "no device");
  const auto comm = std::make_shared<RankComm>();
  comm->device = device;
  comm->rank = rank;
  comm->size = size;
  id.bytes.back() = '\0';
  comm->name = id.bytes.data();
  return connect(comm, handle, is_blocking(config));
}

// Waits for enqueued work, and for the end of all graphs that calls were captured into.
abi::Result ncclCommDestroy(abi::Comm handle) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  virtual_gpu::wait_for(comm->chain);
  virtual_gpu::wait_for_graphs(comm->chain);
  comm->is_destroyed = true;
  forget_memory(*comm);
  drop(handle);
  return abi::kSuccess;
}

abi::Result ncclCommAbort(abi::Comm handle) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  comm->is_aborted = true;
  stop_running(*comm);
  virtual_gpu::wait_for_graphs(comm->chain);
  forget_memory(*comm);
  drop(handle);
  return abi::kSuccess;
}

abi::Result ncclCommGetAsyncError(abi::Comm handle, abi::Result* result) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  *result = comm->status();
  return abi::kSuccess;
}

const char* ncclGetLastError(abi::Comm) { return last_text(); }

const char* ncclGetErrorString(abi::Result result) {
  switch (result) {
    case abi::kSuccess:
      return "no error";
    case abi::kUnhandledCudaError:
      return "unhandled cuda error";
    case abi::kSystemError:
      return "unhandled system error";
    case abi::kInternalError:
      return "internal error";
    case abi::kInvalidArgument:
      return "invalid argument";
    case abi::kInvalidUsage:
      return "invalid usage";
    case abi::kRemoteError:
      return "remote process exited or there was a network error";
    case abi::kInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}

}  // namespace virtual_nccl::exported
