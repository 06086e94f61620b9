// Collectives, sends, receives and groups, up to their place in a stream.

#include <algorithm>
#include <string>
#include <utility>

#include "virtual_gpu/nccl/comm.h"
#include "virtual_gpu/nccl/exported.h"

namespace virtual_nccl {
namespace {

struct Pending {
  CommPtr comm;
  cudaStream_t stream;
  Task task;
};

struct Group {
  int depth = 0;
  abi::Result error = abi::kSuccess;
  std::vector<Pending> pending;
};
thread_local Group the_group;

bool overlap(const Range& a, const Range& b) {
  return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

// NCCL defines in-place operation in one way per call, and the calls of a group must not depend on
// each other.
abi::Result check_ranges(const RankComm& comm, const std::vector<Task>& tasks) {
  struct Owned {
    Range range;
    std::size_t task;
  };
  std::vector<Owned> all;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    for (const Range& range : ranges_of(tasks[i], comm)) {
      if (range.bytes != 0) all.push_back({range, i});
    }
  }
  std::sort(all.begin(), all.end(),
            [](const Owned& a, const Owned& b) { return a.range.begin < b.range.begin; });
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t k = i + 1; k < all.size() && overlap(all[i].range, all[k].range); ++k) {
      const bool is_read = !all[i].range.is_written && !all[k].range.is_written;
      if (is_read || all[i].task == all[k].task) continue;
      return refuse(abi::kInvalidUsage, "calls of one group use the same memory");
    }
  }
  return abi::kSuccess;
}

// Within one call, input and output must be disjoint or exactly in place.
abi::Result check_place(const Task& task, const RankComm& comm) {
  const auto ranges = ranges_of(task, comm);
  if (ranges.size() < 2 || !overlap(ranges[0], ranges[1])) return abi::kSuccess;
  const std::size_t mine = static_cast<std::size_t>(comm.rank) * task.count * size_of(task.type);
  bool is_in_place = false;
  switch (task.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kBroadcast:
      is_in_place = task.in == task.out;
      break;
    case Kind::kAllGather:
    case Kind::kGather:
      is_in_place = task.in == task.out + mine;
      break;
    case Kind::kReduceScatter:
    case Kind::kScatter:
      is_in_place = task.out == task.in + mine;
      break;
    case Kind::kAllToAll:
    case Kind::kSend:
    case Kind::kRecv:
      break;
  }
  return is_in_place ? abi::kSuccess
                     : refuse(abi::kInvalidUsage, "input and output overlap and are not in place");
}

abi::Result enqueue_now(const CommPtr& comm, cudaStream_t stream, std::vector<Task> tasks) {
  const cudaError_t error = virtual_gpu::enqueue(
      stream, comm->device, [comm, tasks = std::move(tasks)] { run_tasks(comm, tasks); },
      comm->chain);
  if (error == cudaSuccess) return abi::kSuccess;
  return refuse(abi::kUnhandledCudaError, cudaGetErrorString(error));
}

// Two ranks connect at their first send or receive, and the host waits until both have called one.
// Returns false if the communicator is aborted first.
bool meet_peers(RankComm& comm, const std::vector<Task>& tasks) {
  auto& has_called = comm.segment->shared().has_called;
  const auto own = static_cast<std::size_t>(comm.rank);
  const auto for_each_peer = [&tasks](const auto& function) {
    return std::all_of(tasks.begin(), tasks.end(), [&](const Task& task) {
      if (task.kind != Kind::kSend && task.kind != Kind::kRecv) return true;
      return function(static_cast<std::size_t>(task.peer));
    });
  };
  for_each_peer([&](std::size_t peer) { return has_called[own][peer] = true; });
  return for_each_peer([&](std::size_t peer) {
    return wait_until([&] { return has_called[peer][own].load(); }, [&] { return comm.is_over(); });
  });
}

abi::Result launch(const CommPtr& comm, cudaStream_t stream, std::vector<Task> tasks) {
  for (const Task& task : tasks) {
    if (const abi::Result result = check_place(task, *comm); result != abi::kSuccess) return result;
  }
  if (const abi::Result result = check_ranges(*comm, tasks); result != abi::kSuccess) return result;
  if (!meet_peers(*comm, tasks)) return refuse(abi::kInternalError, "aborted");
  return enqueue_now(comm, stream, std::move(tasks));
}

abi::Result end_group() {
  const std::vector<Pending> pending = std::exchange(the_group.pending, {});
  abi::Result answer = std::exchange(the_group.error, abi::kSuccess);
  if (answer != abi::kSuccess) return answer;
  std::vector<CommPtr> comms;
  for (const Pending& call : pending) {
    if (std::find(comms.begin(), comms.end(), call.comm) == comms.end()) {
      comms.push_back(call.comm);
    }
  }
  for (const CommPtr& comm : comms) {
    std::vector<Task> tasks;
    cudaStream_t stream = nullptr;
    for (const Pending& call : pending) {
      if (call.comm != comm) continue;
      if (!tasks.empty() && call.stream != stream) {
        return refuse(abi::kInvalidUsage,
                      "virtual NCCL does not support several streams in a group");
      }
      stream = call.stream;
      tasks.push_back(call.task);
    }
    const abi::Result result = launch(comm, stream, std::move(tasks));
    if (result != abi::kSuccess && answer != abi::kInvalidUsage) answer = result;
  }
  return answer;
}

abi::Result check_task(const Task& task, const RankComm& comm) {
  if (!is_known(task.type)) return refuse(abi::kInvalidArgument, "unknown dtype");
  if (task.op < abi::kSum || task.op > abi::kAvg) {
    return refuse(abi::kInvalidArgument, "unknown reduction");
  }
  if (task.peer < 0 || task.peer >= comm.size) {
    return refuse(abi::kInvalidArgument,
                  "rank " + std::to_string(task.peer) + " of " + std::to_string(comm.size));
  }
  for (const Range& range : ranges_of(task, comm)) {
    if (range.begin == nullptr && range.bytes != 0) {
      return refuse(abi::kInvalidArgument, "a null pointer");
    }
  }
  return abi::kSuccess;
}

abi::Result call(abi::Comm handle, abi::Stream stream, const Task& task) {
  CommPtr comm;
  abi::Result result = find_ready(handle, comm);
  if (result == abi::kSuccess) result = check_task(task, *comm);
  const bool is_grouped = the_group.depth != 0;
  if (result != abi::kSuccess) {
    if (is_grouped) the_group.error = result;
    return result;
  }
  the_group.pending.push_back({comm, stream, task});
  return is_grouped ? abi::kSuccess : end_group();
}

}  // namespace

std::vector<Range> ranges_of(const Task& task, const RankComm& comm) {
  const std::size_t one = task.count * size_of(task.type);
  const std::size_t all = one * static_cast<std::size_t>(comm.size);
  const bool is_root = comm.rank == task.peer;
  switch (task.kind) {
    case Kind::kAllReduce:
      return {{task.in, one, false}, {task.out, one, true}};
    case Kind::kReduce:
      if (!is_root) return {{task.in, one, false}};
      return {{task.in, one, false}, {task.out, one, true}};
    case Kind::kBroadcast:
      if (!is_root) return {{task.out, one, true}};
      return {{task.in, one, false}, {task.out, one, true}};
    case Kind::kAllGather:
      return {{task.in, one, false}, {task.out, all, true}};
    case Kind::kReduceScatter:
      return {{task.in, all, false}, {task.out, one, true}};
    case Kind::kAllToAll:
      return {{task.in, all, false}, {task.out, all, true}};
    case Kind::kGather:
      if (!is_root) return {{task.in, one, false}};
      return {{task.in, one, false}, {task.out, all, true}};
    case Kind::kScatter:
      if (!is_root) return {{task.out, one, true}};
      return {{task.in, all, false}, {task.out, one, true}};
    case Kind::kSend:
      return {{task.in, one, false}};
    case Kind::kRecv:
      return {{task.out, one, true}};
  }
  return {};
}

}  // namespace virtual_nccl

namespace virtual_nccl::exported {
namespace {
const char* in_of(const void* data) { return static_cast<const char*>(data); }
char* out_of(void* data) { return static_cast<char*>(data); }
}  // namespace

abi::Result ncclGroupStart() {
  ++the_group.depth;
  return abi::kSuccess;
}

abi::Result ncclGroupEnd() {
  if (the_group.depth == 0) return refuse(abi::kInvalidUsage, "no group has been started");
  return --the_group.depth == 0 ? end_group() : abi::kSuccess;
}

abi::Result ncclAllReduce(const void* in, void* out, std::size_t count, abi::DataType type,
                          abi::RedOp op, abi::Comm comm, abi::Stream stream) {
  return call(comm, stream, {Kind::kAllReduce, in_of(in), out_of(out), count, type, op});
}

abi::Result ncclReduce(const void* in, void* out, std::size_t count, abi::DataType type,
                       abi::RedOp op, int root, abi::Comm comm, abi::Stream stream) {
  return call(comm, stream, {Kind::kReduce, in_of(in), out_of(out), count, type, op, root});
}

abi::Result ncclBroadcast(const void* in, void* out, std::size_t count, abi::DataType type,
                          int root, abi::Comm comm, abi::Stream stream) {
  return call(comm, stream,
              {Kind::kBroadcast, in_of(in), out_of(out), count, type, abi::kSum, root});
}

abi::Result ncclAllGather(const void* in, void* out, std::size_t count, abi::DataType type,
                          abi::Comm comm, abi::Stream stream) {
  return call(comm, stream, {Kind::kAllGather, in_of(in), out_of(out), count, type});
}

abi::Result ncclReduceScatter(const void* in, void* out, std::size_t count, abi::DataType type,
                              abi::RedOp op, abi::Comm comm, abi::Stream stream) {
  return call(comm, stream, {Kind::kReduceScatter, in_of(in), out_of(out), count, type, op});
}

abi::Result ncclAlltoAll(const void* in, void* out, std::size_t count, abi::DataType type,
                         abi::Comm comm, abi::Stream stream) {
  return call(comm, stream, {Kind::kAllToAll, in_of(in), out_of(out), count, type});
}

abi::Result ncclGather(const void* in, void* out, std::size_t count, abi::DataType type, int root,
                       abi::Comm comm, abi::Stream stream) {
  return call(comm, stream, {Kind::kGather, in_of(in), out_of(out), count, type, abi::kSum, root});
}

abi::Result ncclScatter(const void* in, void* out, std::size_t count, abi::DataType type, int root,
                        abi::Comm comm, abi::Stream stream) {
  return call(comm, stream, {Kind::kScatter, in_of(in), out_of(out), count, type, abi::kSum, root});
}

abi::Result ncclSend(const void* in, std::size_t count, abi::DataType type, int peer,
                     abi::Comm comm, abi::Stream stream) {
  return call(comm, stream, {Kind::kSend, in_of(in), nullptr, count, type, abi::kSum, peer});
}

abi::Result ncclRecv(void* out, std::size_t count, abi::DataType type, int peer, abi::Comm comm,
                     abi::Stream stream) {
  return call(comm, stream, {Kind::kRecv, nullptr, out_of(out), count, type, abi::kSum, peer});
}

}  // namespace virtual_nccl::exported
