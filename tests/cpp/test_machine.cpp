// Segments, the heap that divides them, and when memory is freed.

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "host/communicator.h"
#include "host/machine.h"
#include "world.h"

namespace fastdist::test {
namespace {

using host::Heap;

constexpr std::size_t kPage = 4096;

CASE(heap_ranges_never_overlap) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 20; ++trial) {
    constexpr std::size_t kCapacity = 512 * kPage;
    Heap heap(kCapacity);
    std::map<std::size_t, std::size_t> taken;  // offset → requested bytes
    for (int step = 0; step < 1000; ++step) {
      if (random() % 2 == 0) {
        const std::size_t bytes = random() % (9 * kPage);
        std::size_t offset = 0;
        try {
          offset = heap.take(bytes);
        } catch (const Error& error) {
          CHECK(error.code() == ErrorCode::kMemory);
          continue;
        }
        CHECK(offset % kPage == 0 && offset + bytes <= kCapacity);
        const auto next = taken.lower_bound(offset);
        CHECK(next == taken.end() || offset + std::max<std::size_t>(1, bytes) <= next->first);
        if (next != taken.begin()) {
          const auto [before, size] = *std::prev(next);
          CHECK(before + std::max<std::size_t>(1, size) <= offset);
        }
        taken.emplace(offset, bytes);
      } else if (!taken.empty()) {
        auto it = taken.begin();
        std::advance(it, random() % taken.size());
        heap.give(it->first, it->second);
        taken.erase(it);
      }
    }
    for (const auto& [offset, bytes] : taken) heap.give(offset, bytes);
  }
}

CASE(heap_joins_what_is_given_back) {
  for (const auto& order :
       std::vector<std::vector<int>>{{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}}) {
    Heap heap(3 * kPage);
    std::size_t offsets[3];
    for (auto& o : offsets) o = heap.take(kPage);
    CHECK_THROWS(ErrorCode::kMemory, (void)heap.take(1));
    for (const int i : order) heap.give(offsets[i], kPage);
    CHECK(heap.take(3 * kPage) == 0);
  }
}

CASE(heap_refuses_sizes_that_overflow) {
  Heap heap(16 * kPage);
  CHECK_THROWS(ErrorCode::kMemory, (void)heap.take(17 * kPage));
  CHECK_THROWS(ErrorCode::kMemory, (void)heap.take(~std::size_t{0} - kPage));
  CHECK_THROWS(ErrorCode::kMemory, (void)heap.take(~std::size_t{0}));
  CHECK(heap.take(16 * kPage) == 0);
}

CASE(a_block_reads_as_zero_when_used_again) {
  const auto machine = Machine::of_threads(1);
  std::size_t offset = 0;
  for (int i = 0; i < 10; ++i) {
    const SharedBlock block(machine, 0, 3 * kPage);
    if (i == 0) offset = block.offset();
    CHECK(block.offset() == offset);
    CHECK(std::all_of(block.data(), block.data() + 3 * kPage,
                      [](std::byte b) { return b == std::byte{0}; }));
    std::memset(block.data(), 0xFF, 3 * kPage);
  }
}

CASE(blocks_are_taken_by_many_threads_at_once) {
  const auto machine = Machine::of_threads(1);
  in_threads(4, [&](int t) {
    std::mt19937 random(static_cast<unsigned>(t));
    std::vector<std::unique_ptr<SharedBlock>> blocks;
    for (int i = 0; i < 300; ++i) {
      const std::size_t bytes = 1 + random() % (20 * kPage);
      blocks.push_back(std::make_unique<SharedBlock>(machine, 0, bytes));
      for (std::size_t at = 0; at < bytes; at += kPage) {
        CHECK(blocks.back()->data()[at] == std::byte{0});
        blocks.back()->data()[at] = static_cast<std::byte>(t + 1);
      }
      if (blocks.size() < 10) continue;
      std::swap(blocks[random() % 10], blocks.back());
      CHECK(*blocks.back()->data() == static_cast<std::byte>(t + 1));
      blocks.pop_back();
    }
  });
}

CASE(a_segment_grows_and_cannot_shrink) {
  const FileDescriptor file = host::create_segment_file(kPage);
  const host::Mapping mapping(file, 64 * kPage);
  host::grow(file, 8 * kPage);
  mapping.data()[8 * kPage - 1] = std::byte{1};
  host::grow(file, kPage);  // has no effect
  struct stat status{};
  CHECK(::fstat(file.get(), &status) == 0 && status.st_size == 8 * kPage);
  CHECK(::ftruncate(file.get(), kPage) != 0);
}

CASE(a_lock_shows_whether_the_maker_lives) {
  Children children;
  children.start([](int, int parent) {
    const FileDescriptor file = host::create_segment_file(kPage);
    send_fd(parent, file.get());
    for (;;) ::pause();
  });
  const FileDescriptor file = receive_fd(children.socket(0));
  CHECK(host::is_locked_by_other(file));
  children.kill(0);
  CHECK(children.wait(0) == 128 + SIGKILL);
  CHECK(!host::is_locked_by_other(file));
}

CASE(locations_are_found_by_every_process) {
  std::vector<FileDescriptor> files;
  for (int r = 0; r < 2; ++r) files.push_back(host::create_segment_file(kPage));
  const auto machine = std::make_shared<Machine>(std::move(files), 0);
  CHECK(!machine->one_process());
  CHECK(machine->locate(0, machine->window(0)) != 0);  // 0 means not accessible
  const std::byte* last = machine->window(0) + machine->window_bytes() - 1;
  CHECK(machine->find(0, machine->locate(0, last)) == last);
  CHECK(machine->locate(0, machine->window(0) + machine->window_bytes()) == 0);
  CHECK(machine->locate(0, machine->window(0) - 1) == 0);
  const std::byte here{};
  CHECK(machine->locate(0, &here) == 0);
}

// --- blocks of communicators --------------------------------------------------------------------

CASE(blocks_come_back_when_all_ranks_are_gone) {
  const auto machine = Machine::of_threads(3);
  const Tuning tuning = tiny_tuning();
  const std::size_t bytes = HostCommunicator::block_bytes(3, tuning);
  for (int trial = 0; trial < 20; ++trial) {
    Ranks ranks = make_thread_ranks(machine, tuning);
    with_ranks(ranks, [](HostCommunicator& c) { c.barrier(patient()); });
    ranks[static_cast<std::size_t>(trial % 3)].reset();
    const SharedBlock other(machine, 0, bytes);  // must not reuse a block that is still in use
    CHECK(other.offset() != 0);
    ranks.clear();
    const SharedBlock again(machine, 0, bytes);
    CHECK(again.offset() == 0);
  }
}

CASE(a_machine_goes_with_its_last_communicator) {
  std::weak_ptr<Machine> gone;
  {
    const auto machine = Machine::of_threads(4);
    gone = machine;
    Ranks ranks = make_thread_ranks(machine, tiny_tuning());
    with_ranks(ranks, [](HostCommunicator& c) { c.barrier(patient()); });
  }
  CHECK(gone.expired());
}

// Two ranks with separate views of the machine, as processes have.
struct TwoViews {
  std::shared_ptr<Machine> machines[2];
  std::unique_ptr<HostCommunicator> ranks[2];

  explicit TwoViews(const Tuning& tuning) {
    const std::size_t bytes = HostCommunicator::block_bytes(2, tuning);
    std::vector<FileDescriptor> files[2];
    for (int r = 0; r < 2; ++r) {
      FileDescriptor file = host::create_segment_file(bytes);
      files[0].emplace_back(::fcntl(file.get(), F_DUPFD_CLOEXEC, 0));
      files[1].push_back(std::move(file));
    }
    for (int r = 0; r < 2; ++r) machines[r] = std::make_shared<Machine>(std::move(files[r]), r);
    for (int r = 0; r < 2; ++r) {
      auto block = std::make_shared<SharedBlock>(machines[r], r, bytes);
      const std::vector<std::size_t> offsets(2, block->offset());
      ranks[r] = std::make_unique<HostCommunicator>(machines[r], std::vector<int>{0, 1}, r, offsets,
                                                    std::move(block), tuning);
    }
  }
};

// A process that has closed its communicator releases its mappings and descriptors even if others
// are open; the others can still read its blocks.
CASE(a_machine_goes_although_peers_are_open) {
  TwoViews views(tiny_tuning());
  in_threads(2, [&](int r) { views.ranks[r]->barrier(patient()); });
  const std::weak_ptr<Machine> gone = views.machines[0];
  views.ranks[0].reset();
  views.machines[0].reset();
  CHECK(gone.expired());
  const Error error = CHECK_THROWS(ErrorCode::kPeerFailure,
                                   views.ranks[1]->barrier(impatient(std::chrono::seconds(10))));
  CHECK(error.ranks() == std::vector<int>{0});
  CHECK(std::string(error.what()).find("closed") != std::string::npos);
}

// A caller whose location() blocks.
class HeldCaller final : public Caller {
 public:
  [[nodiscard]] std::string location() const override {
    is_held = true;
    while (!may_go) std::this_thread::yield();
    return "held";
  }
  void check_interrupt() const override {}
  mutable std::atomic<bool> is_held{false};
  std::atomic<bool> may_go{false};
};

// close() may be called while another thread's call runs; memory that the call uses must not be
// reallocated before it has ended.
CASE(blocks_are_kept_while_a_closed_rank_still_works) {
  const auto machine = Machine::of_threads(2);
  const Tuning tuning = tiny_tuning();
  const std::size_t bytes = HostCommunicator::block_bytes(2, tuning);
  Ranks ranks = make_thread_ranks(machine, tuning);
  HeldCaller held;
  Array a(DType::kInt32, 1);
  Array b(DType::kInt32, 1);
  std::jthread first([&] {
    try {
      ranks[0]->all_reduce(a.views(), a.views(), ReduceOp::kSum, {std::chrono::seconds(60), &held});
    } catch (const Error&) {
    }
  });
  std::jthread second([&] {
    try {
      ranks[1]->all_reduce(b.views(), b.views(), ReduceOp::kMax, patient());
    } catch (const Error&) {
    }
  });
  while (!held.is_held) std::this_thread::yield();
  ranks[1]->close();
  second.join();
  ranks[1].reset();
  ranks[0]->close();
  const SharedBlock next(machine, 1, bytes);
  std::memset(next.data(), 0xFF, bytes);
  held.may_go = true;
  first.join();
  CHECK(std::all_of(next.data(), next.data() + bytes,
                    [](std::byte x) { return x == std::byte{0xFF}; }));
}

CASE(closing_at_once_from_many_threads_counts_once) {
  for (int trial = 0; trial < 100; ++trial) {
    const auto machine = Machine::of_threads(2);
    Ranks ranks = make_thread_ranks(machine, tiny_tuning());
    in_threads(4, [&](int) { ranks[0]->close(); });
    ranks[0].reset();
    const SharedBlock block(machine, 0, 1);
    CHECK(block.offset() != 0);  // rank 1 has not closed yet
  }
}

// A communicator never writes beyond its block, whatever the tuning.
CASE(work_stays_within_the_block) {
  for (const int n : {1, 2, 7}) {
    for (Tuning tuning : {in_place_tuning(), staged_tuning()}) {
      tuning.stream_bytes = 0;
      tuning.chunk_bytes = 512;
      tuning.lane_bytes = 64;
      const auto machine = Machine::of_threads(n);
      Ranks ranks = make_thread_ranks(machine, tuning);
      std::vector<std::unique_ptr<SharedBlock>> behind;
      constexpr std::size_t kBytes = 16 * kPage;
      for (int r = 0; r < n; ++r) {
        behind.push_back(std::make_unique<SharedBlock>(machine, r, kBytes));
        CHECK(behind.back()->offset() >= HostCommunicator::block_bytes(n, tuning));
        std::memset(behind.back()->data(), 0x5A, kBytes);
      }
      with_ranks(ranks, [&](HostCommunicator& c) {
        const Array in(DType::kFloat32, std::size_t{8192} * static_cast<std::size_t>(n));
        const Array out(DType::kFloat32, 8192);
        std::fill_n(in.as<float>(), in.count(), 1.0F);
        c.all_reduce(in.views(), in.views(), ReduceOp::kSum, patient());
        c.reduce_scatter(in.view(), out.view(), ReduceOp::kSum, patient());
        CHECK(out.as<float>()[8191] == static_cast<float>(n * n));
      });
      for (const auto& block : behind) {
        CHECK(std::all_of(block->data(), block->data() + kBytes,
                          [](std::byte b) { return b == std::byte{0x5A}; }));
      }
    }
  }
}

// Chunks that cannot hold a line per rank would make ranks write into each other's parts.
CASE(tuning_that_cannot_work_is_refused) {
  for (const std::size_t chunk_bytes : {0U, 64U, 500U, 448U - 64U}) {
    Tuning tuning = tiny_tuning();
    tuning.chunk_bytes = chunk_bytes;
    CHECK_THROWS(ErrorCode::kValue, (void)HostCommunicator::block_bytes(7, tuning));
  }
  Tuning tuning = tiny_tuning();
  tuning.lane_bytes = 0;
  CHECK_THROWS(ErrorCode::kValue, (void)HostCommunicator::block_bytes(2, tuning));
}

}  // namespace
}  // namespace fastdist::test
