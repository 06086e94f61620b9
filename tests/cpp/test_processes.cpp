// Ranks as forked processes, each with its own segment, lock and mappings. Some ranks have arrays
// in shared memory and others do not, so that calls mix both ways of reading.
//
// The thread sanitizer cannot see races between processes; test_random runs the staged method under
// it, with threads that do not use arrays in place.

#include <chrono>
#include <vector>

#include "check.h"
#include "schedule.h"

namespace fastdist::test {
namespace {

constexpr int kCalls = kSanitized ? 500 : 2000;

void run_worlds(const Tuning& tuning, int calls, std::uint64_t seed, bool shares_memory) {
  for (const int n : kWorlds) {
    with_processes(n, tuning, [=](HostCommunicator& c) {
      Schedule(c, seed + static_cast<std::uint64_t>(n), shares_memory).run(calls);
    });
  }
}

CASE(processes_that_share_some_arrays) {
  Tuning tuning = tiny_tuning();
  tuning.in_place_bytes = 0;
  run_worlds(tuning, kCalls, 1000, true);
}

CASE(processes_that_share_no_arrays) { run_worlds(tiny_tuning(), kCalls, 2000, false); }

CASE(processes_with_the_default_tuning) { run_worlds(Tuning{}, kCalls / 4, 3000, true); }

// Rank `n` - 1 is killed during work; the other ranks must report it by number, soon.
void check_death(const Tuning& tuning) {
  constexpr int kRanks = 3;
  Children children;
  start_process_ranks(children, kRanks, tuning, [](HostCommunicator& c) {
    Array a(DType::kFloat32, 5000);
    std::fill_n(a.as<float>(), a.count(), 1.0F);
    const auto loop = [&] {
      for (;;) c.all_reduce(a.views(), a.views(), ReduceOp::kMax, patient());
    };
    const Error error = CHECK_THROWS(ErrorCode::kPeerFailure, loop());
    CHECK(error.ranks() == std::vector<int>{kRanks - 1});
    const Error later = CHECK_THROWS(ErrorCode::kPeerFailure, c.barrier(patient()));
    CHECK(later.ranks() == std::vector<int>{kRanks - 1});
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto start = std::chrono::steady_clock::now();
  children.kill(kRanks - 1);
  for (int r = 0; r < kRanks - 1; ++r) CHECK(children.wait(r) == 0);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
}

CASE(a_killed_process_is_noticed) {
  check_death(tiny_tuning());
  check_death(payload_tuning());
}

CASE(a_process_that_ends_without_closing_is_noticed) {
  Children children;
  start_process_ranks(children, 2, tiny_tuning(), [](HostCommunicator& c) {
    c.barrier(patient());
    if (c.rank() == 1) ::_exit(0);
    const Array a(DType::kInt32, 10);
    const Error error = CHECK_THROWS(ErrorCode::kPeerFailure, c.recv(a.view(), 1, patient()));
    CHECK(error.ranks() == std::vector<int>{1});
  });
  for (int r = 0; r < 2; ++r) CHECK(children.wait(r) == 0);
}

// Values that a rank published before it left are still valid.
CASE(a_process_may_leave_at_once_after_its_last_call) {
  for (int trial = 0; trial < 10; ++trial) {
    with_processes(3, staged_tuning(), [](HostCommunicator& c) {
      const Array a(DType::kInt32, 400);
      std::fill_n(a.as<std::int32_t>(), a.count(), c.rank());
      c.broadcast(a.views(), 1, patient());
      if (c.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      CHECK(a.as<std::int32_t>()[399] == 1);
    });
  }
}

}  // namespace
}  // namespace fastdist::test
