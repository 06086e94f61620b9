// Communicators from their beginning to their end.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include "virtual_gpu/nccl/comm.h"
#include "virtual_gpu/nccl/exported.h"

namespace virtual_nccl {
namespace {

void set_text(Note& note, const std::string& text) {
  text.copy(note.text.data(), note.text.size() - 1);
}

abi::Result check_config(const abi::Config* config) {
  if (config == nullptr) return abi::kSuccess;
  if (config->magic != 0xCAFEBEEF || config->size < sizeof(abi::Config)) {
    return refuse(abi::kInvalidArgument, "the configuration was not initialised");
  }
  return abi::kSuccess;
}

bool is_blocking(const abi::Config* config) { return config == nullptr || config->blocking != 0; }

// Runs `connect`, which gives `comm` its place among its ranks: at once, or in the background.
abi::Result begin(const CommPtr& comm, const CommPtr& parent, abi::Comm* handle,
                  const std::function<abi::Result()>& connect) {
  if (comm->blocking) {
    const abi::Result result = connect();
    *handle = result == abi::kSuccess && comm->size > 0 ? make_handle(comm) : nullptr;
    return result;
  }
  *handle = make_handle(comm);
  ++comm->jobs;
  if (parent) ++parent->jobs;
  std::thread([comm, parent, connect] {
    const abi::Result result = connect();
    if (result != abi::kSuccess) comm->fail(result, last_text());
    --comm->jobs;
    if (parent) --parent->jobs;
  }).detach();
  return abi::kInProgress;
}

CommPtr make_comm(int device, const abi::Config* config) {
  auto comm = std::make_shared<RankComm>();
  comm->device = device;
  comm->blocking = is_blocking(config);
  return comm;
}

struct Member {
  int key;
  int rank;  // in the parent
};

// Who has this rank's color, in the order of the keys. Empty: the ranks disagree, or all was given
// up.
std::vector<Member> members_of(RankComm& parent, int color, int key) {
  std::vector<Member> members;
  const auto notes = exchange(parent, {{kSplit, color, key}, {}});
  for (std::size_t p = 0; p < notes.size(); ++p) {
    if (notes[p].numbers[0] != kSplit) return {};
    if (notes[p].numbers[1] == color) {
      members.push_back({static_cast<int>(notes[p].numbers[2]), static_cast<int>(p)});
    }
  }
  std::stable_sort(members.begin(), members.end(),
                   [](const Member& a, const Member& b) { return a.key < b.key; });
  return members;
}

abi::Result connect_split(const CommPtr& comm, const CommPtr& parent, int color, int key) {
  const auto members = members_of(*parent, color, key);
  if (members.empty()) {
    if (parent->is_over()) return refuse(abi::kInternalError, "ncclCommSplit was aborted");
    parent->fail(abi::kInvalidUsage, "not all ranks called ncclCommSplit");
    return refuse(abi::kInvalidUsage, "not all ranks called ncclCommSplit");
  }
  const bool is_first = members[0].rank == parent->rank && color != abi::kNoColor;
  Note note{{kSplitMade, color, 0}, {}};
  if (is_first) set_text(note, Segment::create());
  const auto notes = exchange(*parent, note);
  if (notes.empty()) return refuse(abi::kInternalError, "ncclCommSplit was aborted");
  if (color == abi::kNoColor) return abi::kSuccess;
  comm->name = notes[static_cast<std::size_t>(members[0].rank)].text.data();
  comm->size = static_cast<int>(members.size());
  while (members[static_cast<std::size_t>(comm->rank)].rank != parent->rank) ++comm->rank;
  return join(comm, parent);
}

// The survivors' own way to meet: those who are left out do not take part.
abi::Result connect_shrunk(const CommPtr& comm, const CommPtr& parent,
                           const std::vector<int>& left) {
  std::uint64_t hash = 0;
  for (const int rank : left) hash = hash * 31 + static_cast<std::uint64_t>(rank) + 1;
  const std::uint64_t number = hash * 1000 + ++parent->shrinks[hash];
  Board& board = parent->segment->shared().slots[static_cast<std::size_t>(left[0])].shrink;
  if (parent->rank == left[0]) {
    board.note = {};
    set_text(board.note, Segment::create());
    board.turn.store(number, std::memory_order_release);
  }
  const auto is_there = [&] { return board.turn.load(std::memory_order_acquire) == number; };
  if (!wait_until(is_there, [&] { return bool(parent->is_aborted); })) {
    return refuse(abi::kInternalError, "ncclCommShrink was aborted");
  }
  comm->name = board.note.text.data();
  comm->size = static_cast<int>(left.size());
  while (left[static_cast<std::size_t>(comm->rank)] != parent->rank) ++comm->rank;
  return join(comm, parent);
}

void stop_running(RankComm& comm) {
  // Whoever runs sees the flag that was set, and lets go.
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
  if (name.empty()) return refuse(abi::kSystemError, "no shared memory could be made");
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
                                             std::to_string(kMostRanks) + " are served here");
  }
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return refuse(abi::kUnhandledCudaError, "no device");
  const CommPtr comm = make_comm(device, config);
  comm->rank = rank;
  comm->size = size;
  id.bytes.back() = '\0';
  comm->name = id.bytes.data();
  return begin(comm, nullptr, handle, [comm] { return join(comm, nullptr); });
}

abi::Result ncclCommSplit(abi::Comm handle, int color, int key, abi::Comm* made,
                          abi::Config* config) {
  *made = nullptr;
  CommPtr parent;
  if (const abi::Result result = find_ready(handle, parent); result != abi::kSuccess) return result;
  if (const abi::Result result = check_config(config); result != abi::kSuccess) return result;
  const CommPtr comm = make_comm(parent->device, config);
  const auto connect = [=] { return connect_split(comm, parent, color, key); };
  if (color != abi::kNoColor) return begin(comm, parent, made, connect);
  abi::Comm none = nullptr;
  return begin(comm, parent, &none, connect);
}

abi::Result ncclCommShrink(abi::Comm handle, int* excluded, int count, abi::Comm* made,
                           abi::Config* config, int flags) {
  *made = nullptr;
  const CommPtr parent = find(handle);
  if (!parent) return refuse(abi::kInvalidArgument, "no communicator");
  if (const abi::Result result = check_config(config); result != abi::kSuccess) return result;
  std::vector<int> left;
  for (int rank = 0; rank < parent->size; ++rank) {
    if (std::find(excluded, excluded + count, rank) == excluded + count) left.push_back(rank);
  }
  if (count < 1 || static_cast<int>(left.size()) + count != parent->size ||
      std::find(left.begin(), left.end(), parent->rank) == left.end()) {
    return refuse(abi::kInvalidArgument, "ranks to leave out: others than this one, each once");
  }
  if (flags == abi::kShrinkAbort) {
    parent->is_revoked = true;
    stop_running(*parent);
  } else if (const abi::Result status = parent->status();
             status != abi::kSuccess || parent->is_revoked) {
    return refuse(abi::kInvalidUsage, "after a failure only with NCCL_SHRINK_ABORT");
  }
  const CommPtr comm = make_comm(parent->device, config);
  return begin(comm, parent, made, [=] { return connect_shrunk(comm, parent, left); });
}

abi::Result ncclCommFinalize(abi::Comm handle) {
  CommPtr comm;
  return find_ready(handle, comm);
}

// Waits for what was enqueued, without an end if it has none.
abi::Result ncclCommDestroy(abi::Comm handle) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  virtual_gpu::wait_for(comm->chain);
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
  forget_memory(*comm);
  drop(handle);
  return abi::kSuccess;
}

abi::Result ncclCommRevoke(abi::Comm handle, int) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  comm->is_revoked = true;
  stop_running(*comm);
  return abi::kSuccess;
}

abi::Result ncclCommGetAsyncError(abi::Comm handle, abi::Result* result) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  *result = comm->status();
  return abi::kSuccess;
}

abi::Result ncclCommCount(abi::Comm handle, int* count) {
  CommPtr comm;
  if (const abi::Result result = find_ready(handle, comm); result != abi::kSuccess) return result;
  *count = comm->size;
  return abi::kSuccess;
}

abi::Result ncclCommUserRank(abi::Comm handle, int* rank) {
  CommPtr comm;
  if (const abi::Result result = find_ready(handle, comm); result != abi::kSuccess) return result;
  *rank = comm->rank;
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
