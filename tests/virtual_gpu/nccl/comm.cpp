#include "virtual_gpu/nccl/comm.h"

#include <cstdio>

// Handles are never reused, so that the use of a destroyed one is detected.
struct ncclComm {
  virtual_nccl::CommPtr comm;
};

namespace virtual_nccl {
namespace {

std::mutex handles_mutex;
std::map<abi::Comm, std::unique_ptr<ncclComm>>& handles() {
  static auto* const kHandles = new std::map<abi::Comm, std::unique_ptr<ncclComm>>;
  return *kHandles;
}

thread_local std::string the_text;

}  // namespace

abi::Result RankComm::status() {
  const std::lock_guard lock(mutex);
  if (error == abi::kSuccess && has_failed_peer()) {
    error = abi::kRemoteError;
    error_text = "another rank has failed";
  }
  if (error != abi::kSuccess) the_text = error_text;
  return error;
}

void RankComm::fail(abi::Result result, const std::string& why) {
  {
    const std::lock_guard lock(mutex);
    if (error != abi::kSuccess) return;
    error = result;
    error_text = why;
  }
  std::fprintf(stderr, "virtual NCCL, rank %d of %d: %s\n", rank, size, why.c_str());
  if (Shared* const known = shared.load()) known->has_failed.store(1, std::memory_order_release);
}

CommPtr find(abi::Comm handle) {
  const std::lock_guard lock(handles_mutex);
  const auto found = handles().find(handle);
  if (found != handles().end() && found->second->comm) return found->second->comm;
  std::fprintf(stderr, "virtual NCCL: a call with a communicator that %s\n",
               found == handles().end() ? "never existed" : "has been destroyed");
  return nullptr;
}

abi::Comm make_handle(CommPtr comm) {
  auto made = std::make_unique<ncclComm>(ncclComm{std::move(comm)});
  const abi::Comm handle = made.get();
  const std::lock_guard lock(handles_mutex);
  handles()[handle] = std::move(made);
  return handle;
}

void drop(abi::Comm handle) {
  CommPtr dropped;
  const std::lock_guard lock(handles_mutex);
  const auto found = handles().find(handle);
  if (found != handles().end()) dropped = std::move(found->second->comm);
}

abi::Result find_ready(abi::Comm handle, CommPtr& comm) {
  comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  return comm->status();
}

abi::Result refuse(abi::Result result, const std::string& text) {
  the_text = text;
  return result;
}

const char* last_text() { return the_text.c_str(); }

}  // namespace virtual_nccl
