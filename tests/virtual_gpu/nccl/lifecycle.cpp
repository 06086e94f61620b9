// Communicators from their beginning to their end, and memory that they know.
//
// VIRTUAL_NCCL_WINDOWS=0: a system without symmetric windows.

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

enum Exchange : std::int64_t { kSplit = 1, kSplitMade = 2, kWindow = 3 };

std::mutex memory_mutex;
// What ncclMemAlloc gave, and how many windows it is registered as.
std::map<void*, int>& own_memory() {
  static auto* const kMemory = new std::map<void*, int>;
  return *kMemory;
}

bool has_windows() {
  const char* text = std::getenv("VIRTUAL_NCCL_WINDOWS");
  return text == nullptr || std::atoi(text) != 0;
}

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

// As NCCL does around what it asks of CUDA: a capture of another thread must not suffer.
class Relaxed {
 public:
  Relaxed() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;
  ~Relaxed() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void stop_running(RankComm& comm) {
  // Whoever runs sees the flag that was set, and lets go.
  const std::lock_guard lock(comm.running);
}

void forget_window(void* data) {
  const std::lock_guard lock(memory_mutex);
  const auto found = own_memory().find(data);
  if (found != own_memory().end()) --found->second;
}

// Its windows and registrations go with it.
void end(abi::Comm handle, RankComm& comm) {
  {
    const std::lock_guard lock(comm.mutex);
    for (const auto& [window, data] : comm.windows) {
      forget_window(data);
      delete static_cast<char*>(window);
    }
    for (const auto& [registration, bytes] : comm.registered)
      delete static_cast<char*>(registration);
    comm.windows.clear();
    comm.registered.clear();
  }
  drop(handle);
}

abi::Result register_window(const CommPtr& comm, void* data, std::size_t bytes,
                            abi::Window* window) {
  {
    const std::lock_guard lock(memory_mutex);
    const auto found = own_memory().find(data);
    if (found == own_memory().end() || !virtual_gpu::is_allocation(data, bytes, comm->device)) {
      return refuse(abi::kInvalidArgument, "windows are of memory that ncclMemAlloc gave");
    }
    ++found->second;
  }
  const auto notes = exchange(*comm, {{kWindow, static_cast<std::int64_t>(bytes), 0}, {}});
  for (const Note& note : notes) {
    if (note.numbers[0] == kWindow && note.numbers[1] == static_cast<std::int64_t>(bytes)) continue;
    comm->fail(abi::kInvalidUsage, "ranks disagree about a window or its size");
    return refuse(abi::kInvalidUsage, "ranks disagree about a window or its size");
  }
  if (notes.empty()) return refuse(abi::kInternalError, "ncclCommWindowRegister was aborted");
  *window = reinterpret_cast<abi::Window>(new char);
  const std::lock_guard lock(comm->mutex);
  comm->windows[*window] = data;
  return abi::kSuccess;
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
  end(handle, *comm);
  return abi::kSuccess;
}

abi::Result ncclCommAbort(abi::Comm handle) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  comm->is_aborted = true;
  stop_running(*comm);
  end(handle, *comm);
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

abi::Result ncclMemAlloc(void** data, std::size_t bytes) {
  const Relaxed relaxed;
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
      return refuse(abi::kInvalidArgument, "memory that ncclMemAlloc did not give");
    }
    if (found->second != 0) {
      std::fprintf(stderr, "virtual NCCL: ncclMemFree of memory that is a window still\n");
    }
    own_memory().erase(found);
  }
  const Relaxed relaxed;
  const cudaError_t error = cudaFree(data);
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
    return refuse(abi::kInvalidArgument, "no registration of this communicator");
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
  if (comm->blocking) return register_window(comm, data, bytes, window);
  ++comm->jobs;
  std::thread([=] {
    const abi::Result result = register_window(comm, data, bytes, window);
    if (result != abi::kSuccess) comm->fail(result, last_text());
    --comm->jobs;
  }).detach();
  return abi::kInProgress;
}

abi::Result ncclCommWindowDeregister(abi::Comm handle, abi::Window window) {
  const CommPtr comm = find(handle);
  if (!comm) return refuse(abi::kInvalidArgument, "no communicator");
  const std::lock_guard lock(comm->mutex);
  const auto found = comm->windows.find(window);
  if (found == comm->windows.end()) {
    return refuse(abi::kInvalidArgument, "no window of this communicator");
  }
  forget_window(found->second);
  comm->windows.erase(found);
  delete reinterpret_cast<char*>(window);
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
