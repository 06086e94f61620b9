// Ranks as threads: thousands of random collectives with every method. See schedule.h.

#include "check.h"
#include "schedule.h"

namespace fastdist::test {
namespace {

constexpr int kCalls = 3000;

void run_worlds(const Tuning& tuning, int calls, std::uint64_t seed) {
  for (const int n : kWorlds) {
    with_threads(n, tuning, [=](HostCommunicator& c) {
      Schedule(c, seed + static_cast<std::uint64_t>(n), false).run(calls);
    });
  }
}

CASE(random_calls_on_all_paths) { run_worlds(tiny_tuning(), kCalls, 100); }

CASE(random_calls_staged) { run_worlds(staged_tuning(), kCalls, 200); }

CASE(random_calls_in_place) { run_worlds(in_place_tuning(), kCalls / 2, 300); }

CASE(random_calls_with_payloads) { run_worlds(payload_tuning(), kCalls / 2, 400); }

CASE(random_calls_that_always_sleep) {
  Tuning tuning = tiny_tuning();
  tuning.spin = tuning.spin_crowded = std::chrono::nanoseconds(0);
  run_worlds(tuning, kCalls / 2, 500);
}

CASE(random_calls_that_never_stream_or_always) {
  for (const std::size_t stream_bytes : {std::size_t{0}, ~std::size_t{0}}) {
    for (Tuning tuning : {tiny_tuning(), staged_tuning()}) {
      tuning.stream_bytes = stream_bytes;
      run_worlds(tuning, kCalls / 10, 600);
    }
  }
}

CASE(random_calls_with_the_default_tuning) {
  Tuning tuning;
  tuning.in_place_bytes = 4096;
  run_worlds(tuning, kCalls / 4, 700);
}

// Many short calls with more ranks than cores: each lost wake-up would take 50 ms.
CASE(short_calls_with_many_ranks) {
  constexpr int kRanks = 16;
  constexpr int kRounds = kSanitized ? 300 : 1000;
  const Tuning tuning;
  const auto start = std::chrono::steady_clock::now();
  with_threads(kRanks, tuning, [](HostCommunicator& c) {
    const Array a(DType::kInt32, 4);
    for (int i = 0; i < kRounds; ++i) {
      std::fill_n(a.as<std::int32_t>(), 4, c.rank() + i);
      c.all_reduce(a.views(), a.views(), ReduceOp::kSum, patient());
      CHECK(a.as<std::int32_t>()[3] == kRanks * (kRanks - 1) / 2 + kRanks * i);
    }
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  CHECK_THAT(took.count() < kRounds * 0.02, took.count() << " s for " << kRounds << " calls");
}

// Two communicators of the same ranks, used concurrently by two threads of each rank.
CASE(two_communicators_at_once) {
  const auto machine = Machine::of_threads(3);
  Ranks first = make_thread_ranks(machine, tiny_tuning());
  Ranks second = make_thread_ranks(machine, staged_tuning());
  in_threads(6, [&](int t) {
    HostCommunicator& c = *(t < 3 ? first : second)[static_cast<std::size_t>(t % 3)];
    try {
      Schedule(c, t < 3 ? 1 : 2, false).run(kCalls / 4);
    } catch (...) {
      c.close();
      throw;
    }
  });
}

}  // namespace
}  // namespace fastdist::test
