// How ranks join a communicator, and how their hosts exchange numbers.

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "virtual_gpu/nccl/comm.h"

namespace virtual_nccl {
namespace {

constexpr int kFirstWithSharing = 23003;

// Both are read once per process, as in NCCL.
std::uint64_t host_hash() {
  static const std::uint64_t kHash = [] {
    const char* id = std::getenv("NCCL_HOSTID");
    if (id != nullptr) return std::hash<std::string>{}(std::string("id ") + id);
    char name[256] = {};
    (void)::gethostname(name, sizeof(name) - 1);
    return std::hash<std::string>{}(name);
  }();
  return kHash;
}

bool may_share() {
  static const bool kMay = [] {
    const char* text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return version() >= kFirstWithSharing && text != nullptr && std::atoi(text) != 0;
  }();
  return kMay;
}

RankFacts facts_of(const RankComm& comm) {
  RankFacts facts{host_hash(), {}, may_share()};
  cudaDeviceProp properties{};
  (void)cudaGetDeviceProperties(&properties, comm.device);
  std::memcpy(facts.device.data(), properties.uuid.bytes, facts.device.size());
  return facts;
}

abi::Result check_devices(const RankComm& comm) {
  const auto& slots = comm.segment->shared().slots;
  for (int a = 0; a < comm.size; ++a) {
    const RankFacts& one = slots[static_cast<std::size_t>(a)].facts;
    for (int b = 0; b < a; ++b) {
      const RankFacts& other = slots[static_cast<std::size_t>(b)].facts;
      if (one.host != other.host || one.device != other.device) continue;
      if (one.may_share && other.may_share) continue;
      return refuse(abi::kInvalidUsage, "Duplicate GPU detected: ranks " + std::to_string(b) +
                                            " and " + std::to_string(a) + " have the same device");
    }
  }
  return abi::kSuccess;
}

}  // namespace

abi::Result join(const CommPtr& comm) {
  comm->segment = Segment::open(comm->name);
  if (!comm->segment) return refuse(abi::kSystemError, "the unique id does not name a segment");
  Shared& shared = comm->segment->shared();
  comm->shared.store(&shared, std::memory_order_release);
  int size = 0;
  if (!shared.size.compare_exchange_strong(size, comm->size) && size != comm->size) {
    return refuse(abi::kInvalidArgument,
                  "ranks disagree on the number of ranks: " + std::to_string(size) + " and " +
                      std::to_string(comm->size));
  }
  Slot& slot = shared.slots[static_cast<std::size_t>(comm->rank)];
  if (slot.is_taken.exchange(1) != 0) {
    return refuse(abi::kInvalidUsage, "rank " + std::to_string(comm->rank) +
                                          " has joined twice, or the unique id was used before");
  }
  slot.facts = facts_of(*comm);
  slot.has_joined.store(1, std::memory_order_release);
  const auto are_all_here = [&] {
    for (int p = 0; p < comm->size; ++p) {
      if (shared.slots[static_cast<std::size_t>(p)].has_joined.load(std::memory_order_acquire) ==
          0) {
        return false;
      }
    }
    return true;
  };
  if (!wait_until(are_all_here, [&] { return comm->is_over(); })) {
    return refuse(abi::kInternalError, "connecting was aborted");
  }
  Segment::forget(comm->name);
  return check_devices(*comm);
}

std::vector<std::uint64_t> exchange(RankComm& comm, std::uint64_t number) {
  const std::uint64_t turn = ++comm.turns;
  auto& slots = comm.segment->shared().slots;
  const auto board_of = [&](int rank) -> Board& {
    return slots[static_cast<std::size_t>(rank)].boards[turn % 2];
  };
  board_of(comm.rank).number = number;
  board_of(comm.rank).turn.store(turn, std::memory_order_release);
  std::vector<std::uint64_t> numbers;
  // A rank that writes turn + 2 here has seen turn + 1 of all ranks, so they have read this number.
  for (int p = 0; p < comm.size; ++p) {
    const auto is_there = [&] { return board_of(p).turn.load(std::memory_order_acquire) >= turn; };
    if (!wait_until(is_there, [&] { return comm.is_over(); })) return {};
    numbers.push_back(board_of(p).number);
  }
  return numbers;
}

}  // namespace virtual_nccl
