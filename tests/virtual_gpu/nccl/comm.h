// A rank's communicator of the virtual NCCL.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/abi.h"
#include "virtual_gpu/cuda/work.h"
#include "virtual_gpu/nccl/segment.h"

namespace virtual_nccl {

namespace abi = fastdist::nccl::abi;

struct RankComm {
  int rank = 0;
  int size = 0;
  int device = 0;
  std::string name;  // of the segment
  std::shared_ptr<Segment> segment;
  std::atomic<Shared*> shared{nullptr};  // of the segment, once open
  std::shared_ptr<virtual_gpu::Chain> chain = virtual_gpu::make_chain();

  std::atomic<bool> is_aborted{false};
  std::atomic<bool> is_destroyed{false};
  std::mutex running;  // held while the device runs a call

  std::uint64_t turns = 0;  // number of exchanges between hosts

  std::mutex mutex;  // guards the members below
  abi::Result error = abi::kSuccess;
  std::string error_text;
  std::map<void*, std::size_t> registered;  // by handle
  std::map<void*, void*> windows;           // memory by window

  [[nodiscard]] bool is_given_up() const { return is_aborted || is_destroyed; }
  [[nodiscard]] bool has_failed_peer() const {
    const Shared* const known = shared.load(std::memory_order_acquire);
    return known != nullptr && known->has_failed.load(std::memory_order_acquire) != 0;
  }
  [[nodiscard]] bool is_over() const { return is_given_up() || has_failed_peer(); }
  // Returns the asynchronous error.
  [[nodiscard]] abi::Result status();
  // Fails visibly: reports on stderr, to the peers, and as an asynchronous error.
  void fail(abi::Result result, const std::string& why);
};
using CommPtr = std::shared_ptr<RankComm>;

// --- Handles ---------------------------------------------------------------------------------

// Returns null for a handle that is not a communicator or was destroyed, and reports it on stderr.
[[nodiscard]] CommPtr find(abi::Comm handle);
[[nodiscard]] abi::Comm make_handle(CommPtr comm);
void drop(abi::Comm handle);
// Also checks that it may be called now: returns kSuccess, or the result that the call must return.
[[nodiscard]] abi::Result find_ready(abi::Comm handle, CommPtr& comm);

// Stores the text for ncclGetLastError and returns `result`.
abi::Result refuse(abi::Result result, const std::string& text);
[[nodiscard]] const char* last_text();

// --- Joining (join.cpp) ----------------------------------------------------------------------

// Joins the segment that `comm` names and waits for all ranks.
[[nodiscard]] abi::Result join(const CommPtr& comm);
// Exchanges a number between all ranks. Returns an empty vector if the communicator was aborted.
[[nodiscard]] std::vector<std::uint64_t> exchange(RankComm& comm, std::uint64_t number);

// Releases a communicator's windows and registrations (memory.cpp).
void forget_memory(RankComm& comm);

// --- Calls (calls.cpp) -----------------------------------------------------------------------

enum class Kind : int {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
};

struct Task {
  Kind kind;
  const char* in;
  char* out;
  std::size_t count;
  abi::DataType type;
  abi::RedOp op = abi::kSum;
  int peer = 0;  // or the root
};

// The device's part of a call: moves the data of tasks that run together and waits for the peers'
// parts (run.cpp).
void run_tasks(const CommPtr& comm, const std::vector<Task>& tasks);

[[nodiscard]] std::size_t size_of(abi::DataType type);
[[nodiscard]] bool is_known(abi::DataType type);
// Computes out[i] = sources[0][i] ∘ sources[1][i] ∘ …
void reduce(abi::DataType type, abi::RedOp op, char* out, const std::vector<const char*>& sources,
            std::size_t count);

// Returns the memory that a task reads and writes on this rank.
struct Range {
  const char* begin;
  std::size_t bytes;
  bool is_written;
};
[[nodiscard]] std::vector<Range> ranges_of(const Task& task, const RankComm& comm);

// --- The version of this library (version_*.cpp) ----------------------------------------------

[[nodiscard]] int version();

}  // namespace virtual_nccl
