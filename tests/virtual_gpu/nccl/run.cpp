// The device's part of a call: moves bytes through the channels, all transfers of a group
// concurrently, so that no transfer waits for another of the same group, and reduces in rank order.
//
// Each transfer begins with a header that describes the sender's call. If the receiver's call
// differs, the real library would hang or move garbage; here both ranks fail with the reason.

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>

#include "virtual_gpu/nccl/comm.h"

namespace virtual_nccl {
namespace {

struct Header {
  std::int32_t kind;
  std::int32_t type;
  std::int32_t op;
  std::int32_t peer;
  std::uint64_t bytes;
  bool operator==(const Header&) const = default;
};

// One direction of one transfer, with its progress.
struct Transfer {
  Header header;
  char* data;
  std::size_t bytes;
  std::size_t done = 0;  // bytes of header and data
  Header found{};        // receivers: the sender's header
};

// The transfers of one channel, in order.
struct Lane {
  Channel* channel;
  bool sends;
  std::deque<Transfer> transfers;
};

std::string text_of(const Header& header) {
  constexpr std::array<const char*, 10> kNames{
      "ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather",     "ncclReduceScatter",
      "ncclAlltoAll",  "ncclGather", "ncclScatter",   "ncclSend/ncclRecv", "ncclSend/ncclRecv"};
  return std::string(kNames[static_cast<std::size_t>(header.kind)]) + " of " +
         std::to_string(header.bytes) + " bytes (type " + std::to_string(header.type) + ", op " +
         std::to_string(header.op) + ", root " + std::to_string(header.peer) + ")";
}

// Copies as many bytes as fit now. `memory` holds the `bytes` bytes at `offset` of `transfer`.
std::size_t step(Channel& channel, bool sends, char* memory, std::size_t bytes) {
  const std::uint64_t written = channel.written.load(std::memory_order_acquire);
  const std::uint64_t read = channel.read.load(std::memory_order_acquire);
  const std::uint64_t at = sends ? written : read;
  const std::size_t room = sends ? kChannelBytes - (written - read) : written - read;
  const std::size_t count = std::min({bytes, room, kChannelBytes - at % kChannelBytes});
  if (count == 0) return 0;
  char* const ring = channel.data.data() + at % kChannelBytes;
  std::memcpy(sends ? ring : memory, sends ? memory : ring, count);
  (sends ? channel.written : channel.read).store(at + count, std::memory_order_release);
  return count;
}

// Returns true if data moved. Throws a message if the ranks disagree.
bool progress(Lane& lane) {
  Transfer& transfer = lane.transfers.front();
  if (transfer.done < sizeof(Header)) {
    Header& header = lane.sends ? transfer.header : transfer.found;
    const std::size_t moved =
        step(*lane.channel, lane.sends, reinterpret_cast<char*>(&header) + transfer.done,
             sizeof(Header) - transfer.done);
    transfer.done += moved;
    if (!lane.sends && transfer.done == sizeof(Header) && transfer.found != transfer.header) {
      throw std::runtime_error("ranks disagree: this one called " + text_of(transfer.header) +
                               ", another " + text_of(transfer.found));
    }
    return moved != 0;
  }
  const std::size_t done = transfer.done - sizeof(Header);
  const std::size_t moved =
      step(*lane.channel, lane.sends, transfer.data + done, transfer.bytes - done);
  transfer.done += moved;
  if (transfer.done == sizeof(Header) + transfer.bytes) lane.transfers.pop_front();
  return moved != 0 || transfer.bytes == 0;
}

// The transfers of a batch of tasks, and the reductions to compute when they have ended.
class Batch {
 public:
  Batch(RankComm& comm, const std::vector<Task>& tasks) : comm_(comm), tasks_(tasks) {
    for (const Task& task : tasks) add(task);
  }

  // Returns false if the communicator was aborted.
  bool move() {
    std::erase_if(lanes_, [](const Lane& lane) { return lane.transfers.empty(); });
    while (!lanes_.empty()) {
      const auto advance = [&] {
        bool has_moved = false;
        for (Lane& lane : lanes_) has_moved = progress(lane) || has_moved;
        std::erase_if(lanes_, [](const Lane& lane) { return lane.transfers.empty(); });
        return has_moved;
      };
      if (!wait_until(advance, [&] { return comm_.is_over(); })) return false;
    }
    return true;
  }

  void finish() {
    for (const Reduction& reduction : reductions_) {
      const Task& task = *reduction.task;
      std::vector<const char*> sources;
      for (const auto& part : reduction.parts) sources.push_back(part.data());
      std::vector<char> result(task.count * size_of(task.type));
      reduce(task.type, task.op, result.data(), sources, task.count);
      std::memcpy(task.out, result.data(), result.size());
    }
  }

 private:
  struct Reduction {
    const Task* task;
    std::vector<std::vector<char>> parts;  // by rank
  };

  void add(const Task& task) {
    const std::size_t bytes = task.count * size_of(task.type);
    const bool is_root = comm_.rank == task.peer;
    switch (task.kind) {
      case Kind::kAllReduce:
        send_to_all(task, task.in, 0);
        return receive_to_reduce(task);
      case Kind::kReduce:
        send(task, task.peer, task.in);
        if (is_root) receive_to_reduce(task);
        return;
      case Kind::kBroadcast:
        if (is_root) send_to_all(task, task.in, 0);
        return receive(task, task.peer, task.out);
      case Kind::kAllGather:
        send_to_all(task, task.in, 0);
        return receive_from_all(task);
      case Kind::kReduceScatter:
        send_to_all(task, task.in, bytes);
        return receive_to_reduce(task);
      case Kind::kAllToAll:
        send_to_all(task, task.in, bytes);
        return receive_from_all(task);
      case Kind::kGather:
        send(task, task.peer, task.in);
        if (is_root) receive_from_all(task);
        return;
      case Kind::kScatter:
        if (is_root) send_to_all(task, task.in, bytes);
        return receive(task, task.peer, task.out);
      case Kind::kSend:
        return send(task, task.peer, task.in);
      case Kind::kRecv:
        return receive(task, task.peer, task.out);
    }
  }

  void send_to_all(const Task& task, const char* data, std::size_t stride) {
    for (int p = 0; p < comm_.size; ++p) {
      send(task, p, data + static_cast<std::size_t>(p) * stride);
    }
  }

  void receive_from_all(const Task& task) {
    const std::size_t bytes = task.count * size_of(task.type);
    for (int p = 0; p < comm_.size; ++p) {
      receive(task, p, task.out + static_cast<std::size_t>(p) * bytes);
    }
  }

  void receive_to_reduce(const Task& task) {
    const std::size_t bytes = task.count * size_of(task.type);
    Reduction reduction{&task, std::vector<std::vector<char>>(static_cast<std::size_t>(comm_.size),
                                                              std::vector<char>(bytes))};
    reductions_.push_back(std::move(reduction));
    for (int p = 0; p < comm_.size; ++p) {
      receive(task, p, reductions_.back().parts[static_cast<std::size_t>(p)].data());
    }
  }

  void send(const Task& task, int peer, const char* data) {
    lane(task, comm_.rank, peer, true)
        .push_back({header_of(task), const_cast<char*>(data), task.count * size_of(task.type)});
  }

  void receive(const Task& task, int peer, char* data) {
    lane(task, peer, comm_.rank, false)
        .push_back({header_of(task), data, task.count * size_of(task.type)});
  }

  static bool is_pair(const Task& task) {
    return task.kind == Kind::kSend || task.kind == Kind::kRecv;
  }

  static Header header_of(const Task& task) {
    const std::uint64_t bytes = task.count * size_of(task.type);
    if (is_pair(task)) return {static_cast<int>(Kind::kSend), 0, 0, 0, bytes};
    return {static_cast<int>(task.kind), task.type, task.op, task.peer, bytes};
  }

  std::deque<Transfer>& lane(const Task& task, int from, int to, bool sends) {
    Channel& channel =
        comm_.segment->shared().channels[is_pair(task) ? 1 : 0][static_cast<std::size_t>(from)]
                                        [static_cast<std::size_t>(to)];
    for (Lane& lane : lanes_) {
      if (lane.channel == &channel && lane.sends == sends) return lane.transfers;
    }
    lanes_.push_back({&channel, sends, {}});
    return lanes_.back().transfers;
  }

  RankComm& comm_;
  const std::vector<Task>& tasks_;
  std::deque<Reduction> reductions_;  // a deque, since transfers point to the parts
  std::vector<Lane> lanes_;
};

void poison(const RankComm& comm, const std::vector<Task>& tasks) {
  for (const Task& task : tasks) {
    for (const Range& range : ranges_of(task, comm)) {
      if (range.is_written) {
        std::memset(const_cast<char*>(range.begin), virtual_gpu::kFresh, range.bytes);
      }
    }
  }
}

}  // namespace

void run_tasks(const CommPtr& comm, const std::vector<Task>& tasks) {
  if (comm->is_destroyed) {
    throw virtual_gpu::Failure(cudaErrorIllegalAddress,
                               "a call of a communicator that has been destroyed");
  }
  const std::lock_guard lock(comm->running);
  if (comm->is_aborted) return;
  for (const Task& task : tasks) {
    for (const Range& range : ranges_of(task, *comm)) {
      virtual_gpu::check_memory(range.begin, range.bytes, comm->device);
    }
  }
  try {
    Batch batch(*comm, tasks);
    if (!comm->is_over() && batch.move()) return batch.finish();
  } catch (const virtual_gpu::Failure&) {
    throw;
  } catch (const std::runtime_error& error) {
    comm->fail(abi::kInvalidUsage, error.what());
  }
  // As on a real device, a call that cannot proceed waits until it is aborted.
  (void)wait_until([&] { return comm->is_given_up(); }, [] { return false; });
  poison(*comm, tasks);
}

}  // namespace virtual_nccl
