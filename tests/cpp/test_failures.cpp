// Ranks that call different collectives, are late, leave, or are interrupted.

#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "world.h"

namespace fastdist::test {
namespace {

using namespace std::chrono_literals;

bool contains(const Error& error, const std::string& text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

// --- mismatches ---------------------------------------------------------------------------------

void check_usable(HostCommunicator& c, int call) {
  const Array a(DType::kInt32, 700);
  std::fill_n(a.as<std::int32_t>(), a.count(), c.rank() + call);
  c.all_reduce(a.views(), a.views(), ReduceOp::kSum, patient());
  const int n = c.size();
  CHECK(a.as<std::int32_t>()[699] == n * (n - 1) / 2 + n * call);
}

CASE(ranks_that_disagree_all_throw_and_go_on) {
  for (const int n : {2, 3, 7}) {
    for (const Tuning& tuning : {tiny_tuning(), staged_tuning(), in_place_tuning()}) {
      with_threads(n, tuning, [n](HostCommunicator& c) {
        const TestCaller caller("train.py:" + std::to_string(10 + c.rank()));
        const CallOptions options{10s, &caller};
        const int odd = n - 1;
        for (int round = 0; round < 20; ++round) {
          const bool is_odd = c.rank() == odd;
          const std::size_t count = round % 2 == 0 ? 10 : 2000;
          const Array a(DType::kFloat32, count);
          const Array b(DType::kInt32, count);
          const Array longer(DType::kFloat32, count + 1);
          const Array out(DType::kFloat32, count * static_cast<std::size_t>(n));
          std::fill_n(a.as<float>(), count, 5.0F);
          const std::vector<TensorView> list{a.view(), a.view()};
          const Error error = CHECK_THROWS(
              ErrorCode::kMismatch, ([&] {
                if (!is_odd) return c.all_reduce(a.views(), a.views(), ReduceOp::kSum, options);
                switch (round % 7) {
                  case 0:
                    return c.all_reduce(a.views(), a.views(), ReduceOp::kMax, options);
                  case 1:
                    return c.all_reduce(b.views(), b.views(), ReduceOp::kSum, options);
                  case 2:
                    return c.all_reduce(longer.views(), longer.views(), ReduceOp::kSum, options);
                  case 3:
                    return c.barrier(options);
                  case 4:
                    return c.all_gather(a.view(), out.view(), options);
                  case 5:
                    return c.all_reduce(list, list, ReduceOp::kSum, options);
                  default:
                    return c.broadcast(a.views(), 0, options);
                }
              }()));
          CHECK(contains(error, "all_reduce(float32 × " + std::to_string(count)));
          for (int r = 0; r < n; ++r)
            CHECK(contains(error, "at train.py:" + std::to_string(10 + r)));
          CHECK(is_odd ? error.ranks().size() == static_cast<std::size_t>(n - 1)
                       : error.ranks() == std::vector<int>{odd});
          for (std::size_t i = 0; i < count; ++i) CHECK(a.as<float>()[i] == 5.0F);  // unchanged
          if (round % 3 == 0) check_usable(c, round);
        }
      });
    }
  }
}

CASE(a_broadcast_from_two_roots_is_a_mismatch) {
  with_threads(3, tiny_tuning(), [](HostCommunicator& c) {
    const Array a(DType::kFloat32, 10);
    CHECK_THROWS(ErrorCode::kMismatch, c.broadcast(a.views(), c.rank() == 2 ? 1 : 0, patient()));
    check_usable(c, 1);
  });
}

CASE(tables_of_all_to_all_must_agree) {
  with_threads(2, tiny_tuning(), [](HostCommunicator& c) {
    const Array a(DType::kInt32, 20);
    const Array b(DType::kInt32, 20);
    const std::vector<std::size_t> counts{1, 2, 3, static_cast<std::size_t>(4 + c.rank())};
    CHECK_THROWS(ErrorCode::kMismatch, c.all_to_all(a.view(), b.view(), counts, patient()));
    check_usable(c, 1);
  });
}

CASE(steps_of_a_call_announce_the_whole) {
  with_threads(2, tiny_tuning(), [](HostCommunicator& c) {
    const Array a(DType::kInt32, 4);
    const Signature whole =
        signature_of({.op = Op::kAllGather}, c.rank() == 0 ? a.views() : TensorViews{});
    CallOptions options = patient();
    options.whole = &whole;
    CHECK_THROWS(ErrorCode::kMismatch, c.barrier(options));
    check_usable(c, 1);
  });
}

CASE(send_and_recv_that_do_not_fit) {
  for (const Tuning& tuning : {tiny_tuning(), in_place_tuning()}) {
    with_threads(2, tuning, [](HostCommunicator& c) {
      for (int round = 0; round < 10; ++round) {
        const Array a(DType::kInt32, 50);
        const Array b(round % 2 == 0 ? DType::kInt32 : DType::kFloat32, round % 2 == 0 ? 51 : 50);
        if (c.rank() == 0) {
          CHECK_THROWS(ErrorCode::kMismatch, c.send(a.view(), 1, patient()));
          std::fill_n(a.as<std::int32_t>(), 50, round);
          c.send(a.view(), 1, patient());
        } else {
          CHECK_THROWS(ErrorCode::kMismatch, c.recv(b.view(), 0, patient()));
          c.recv(a.view(), 0, patient());
          CHECK(a.as<std::int32_t>()[49] == round);
        }
      }
      check_usable(c, 1);
    });
  }
}

CASE(ranks_that_wait_for_each_other_all_throw) {
  for (const int n : {2, 3, 5}) {
    with_threads(n, tiny_tuning(), [n](HostCommunicator& c) {
      const TestCaller caller("train.py:" + std::to_string(10 + c.rank()));
      const CallOptions options{10s, &caller};
      const Array a(DType::kInt32, 50);
      c.barrier(options);
      const auto start = std::chrono::steady_clock::now();
      const Error error = CHECK_THROWS(ErrorCode::kMismatch, ([&] {
                                         if (c.rank() != n - 1) return c.barrier(options);
                                         c.send(a.view(), 0, options);
                                       }()));
      CHECK(std::chrono::steady_clock::now() - start < 5s);
      CHECK_THAT(contains(error, "rank 0: barrier(), for rank " + std::to_string(n - 1) +
                                     " at train.py:10"),
                 error.what());
      CHECK_THAT(contains(error, ": send(int32 × 50, dst=0), for rank 0"), error.what());
      CHECK(!error.ranks().empty());
      CHECK_THROWS(ErrorCode::kMismatch, c.barrier(options));
    });
  }
}

CASE(calls_that_were_submitted_may_still_act) {
  with_threads(2, tiny_tuning(), [](HostCommunicator& c) {
    const Array a(DType::kInt32, 50);
    if (c.rank() == 0) {
      c.count_submitted(1);
      std::jthread receiver([&] {
        std::this_thread::sleep_for(300ms);
        c.recv(a.view(), 1, patient());
        c.count_submitted(-1);
      });
      c.barrier(patient());
    } else {
      c.send(a.view(), 0, patient());
      c.barrier(patient());
    }
  });
}

// --- ranks that are late or leave ---------------------------------------------------------------

CASE(a_late_rank_is_named) {
  for (const Tuning& tuning : {tiny_tuning(), staged_tuning()}) {
    Ranks ranks = make_thread_ranks(3, tuning);
    in_threads(2, [&](int r) {
      const Array a(DType::kInt32, 200);
      HostCommunicator& c = *ranks[static_cast<std::size_t>(r)];
      const Error error = CHECK_THROWS(
          ErrorCode::kTimeout, c.all_reduce(a.views(), a.views(), ReduceOp::kSum, impatient()));
      CHECK(error.ranks() == std::vector<int>{2});
      CHECK(contains(error, "rank 2: none"));
      const Error later = CHECK_THROWS(ErrorCode::kTimeout, c.barrier(patient()));
      CHECK(later.ranks() == std::vector<int>{2});
    });
    const Array a(DType::kInt32, 200);
    // The late rank fails immediately, without a timeout of its own.
    const auto start = std::chrono::steady_clock::now();
    CHECK_THROWS(ErrorCode::kTimeout,
                 ranks[2]->all_reduce(a.views(), a.views(), ReduceOp::kSum, patient()));
    CHECK(std::chrono::steady_clock::now() - start < 5s);
  }
}

CASE(a_recv_without_a_send_times_out) {
  Ranks ranks = make_thread_ranks(2, tiny_tuning());
  const Array a(DType::kInt32, 1);
  const Error error = CHECK_THROWS(ErrorCode::kTimeout, ranks[0]->recv(a.view(), 1, impatient()));
  CHECK(error.ranks() == std::vector<int>{1});
}

CASE(a_rank_that_closes_is_named) {
  for (const int n : {2, 4}) {
    const auto last = static_cast<std::size_t>(n - 1);
    Ranks ranks = make_thread_ranks(n, tiny_tuning());
    std::jthread closer([&] {
      std::this_thread::sleep_for(20ms);
      ranks[last]->close();
    });
    const auto start = std::chrono::steady_clock::now();
    in_threads(n - 1, [&](int r) {
      const Error error = CHECK_THROWS(ErrorCode::kPeerFailure,
                                       ranks[static_cast<std::size_t>(r)]->barrier(patient()));
      CHECK(error.ranks() == std::vector<int>{n - 1});
      CHECK_THAT(contains(error, "closed"), error.what());  // rather than died
    });
    CHECK(std::chrono::steady_clock::now() - start < 5s);
    closer.join();
    CHECK_THROWS(ErrorCode::kState, ranks[last]->barrier(patient()));
  }
}

// Calls that matched before a rank closed still complete.
CASE(closing_right_after_a_call_harms_nobody) {
  for (int trial = 0; trial < (kSanitized ? 100 : 300); ++trial) {
    const Tuning tuning = trial % 3 == 0   ? staged_tuning()
                          : trial % 3 == 1 ? tiny_tuning()
                                           : in_place_tuning();
    with_threads(3, tuning, [trial](HostCommunicator& c) {
      const Array a(DType::kInt32, 600);
      std::fill_n(a.as<std::int32_t>(), a.count(), c.rank() == trial % 3 ? trial : -1);
      c.broadcast(a.views(), trial % 3, patient());
      c.close();
      CHECK(a.as<std::int32_t>()[599] == trial);
    });
  }
}

CASE(own_calls_end_when_another_thread_closes) {
  Ranks ranks = make_thread_ranks(2, tiny_tuning());
  const Array a(DType::kInt32, 1);
  std::jthread waiting([&] { CHECK_THROWS(ErrorCode::kState, ranks[0]->barrier(patient())); });
  std::jthread receiving(
      [&] { CHECK_THROWS(ErrorCode::kState, ranks[0]->recv(a.view(), 1, patient())); });
  std::this_thread::sleep_for(20ms);
  const auto start = std::chrono::steady_clock::now();
  ranks[0]->close();
  waiting.join();
  receiving.join();
  CHECK(std::chrono::steady_clock::now() - start < 2s);
}

CASE(an_interrupted_rank_frees_the_others) {
  with_threads(3, tiny_tuning(), [](HostCommunicator& c) {
    TestCaller caller;
    caller.interrupted = c.rank() == 1;
    bool threw = false;
    try {
      if (c.rank() == 2) std::this_thread::sleep_for(200ms);
      c.barrier({60s, &caller});
    } catch (const Failure&) {
      threw = true;
      CHECK(c.rank() == 1);
    } catch (const Error& error) {
      threw = true;
      CHECK(error.code() == ErrorCode::kPeerFailure && error.ranks() == std::vector<int>{1});
    }
    CHECK(threw || c.rank() == 2);
  });
}

// --- arrays of a rank whose call failed ---------------------------------------------------------
//
// Arrays used in place belong to the caller again as soon as the call has thrown. These tests run
// in their own process, since they check that nothing crashes.

void in_own_process(void (*body)()) {
  Children children;
  children.start([body](int, int) { body(); });
  const int status = children.wait(0);
  CHECK_THAT(status == 0, "the process ended with " << status);
}

struct Pages {
  static constexpr std::size_t kBytes = 64 << 10;
  std::byte* data = static_cast<std::byte*>(
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  [[nodiscard]] TensorView view() const { return {data, kBytes / 4, DType::kInt32, 0}; }
  void protect(int protection) const { ::mprotect(data, kBytes, protection); }
};

using Call = void (*)(HostCommunicator&, const TensorView&, const CallOptions&);

void check_late(Call call) {
  Ranks ranks = make_thread_ranks(2, in_place_tuning());
  const Pages early;
  CHECK_THROWS(ErrorCode::kTimeout, call(*ranks[0], early.view(), impatient()));
  early.protect(PROT_NONE);
  const Pages late;
  CHECK_THROWS(ErrorCode::kTimeout, call(*ranks[1], late.view(), patient()));
}

void all_reduce_it(HostCommunicator& c, const TensorView& a, const CallOptions& options) {
  c.all_reduce({&a, 1}, {&a, 1}, ReduceOp::kSum, options);
}
void broadcast_it(HostCommunicator& c, const TensorView& a, const CallOptions& options) {
  c.broadcast({&a, 1}, 0, options);
}
void transfer_it(HostCommunicator& c, const TensorView& a, const CallOptions& options) {
  if (c.rank() == 0) {
    c.send(a, 1, options);
  } else {
    c.recv(a, 0, options);
  }
}

CASE(late_all_reduce_leaves_arrays_alone) {
  in_own_process([] { check_late(all_reduce_it); });
}
CASE(late_broadcast_leaves_arrays_alone) {
  in_own_process([] { check_late(broadcast_it); });
}
CASE(late_recv_leaves_arrays_alone) {
  in_own_process([] { check_late(transfer_it); });
}

// A rank that writes its array very slowly: a signal handler holds up the first access.
const Pages* slow_pages = nullptr;
std::atomic<bool> is_touching{false};
std::atomic<bool> peer_has_returned{false};
std::atomic<bool> returned_while_touching{false};

void on_fault(int) {
  is_touching = true;
  for (int i = 0; i < 500 && !peer_has_returned; ++i) ::usleep(1000);
  returned_while_touching = peer_has_returned.load();
  slow_pages->protect(PROT_READ | PROT_WRITE);
}

void check_slow(Call call) {
  Ranks ranks = make_thread_ranks(2, in_place_tuning());
  const Pages fast;
  const Pages slow;
  slow_pages = &slow;
  slow.protect(PROT_NONE);
  struct sigaction action{};
  action.sa_handler = on_fault;
  ::sigaction(SIGSEGV, &action, nullptr);
  in_threads(2, [&](int r) {
    try {
      call(*ranks[static_cast<std::size_t>(r)], r == 0 ? fast.view() : slow.view(),
           r == 0 ? impatient() : patient());
    } catch (const Error&) {
    }
    if (r == 0) peer_has_returned = true;
  });
  CHECK(is_touching);
  CHECK(!returned_while_touching);
}

CASE(a_broadcast_does_not_give_up_amid_a_copy) {
  in_own_process([] { check_slow(broadcast_it); });
}
CASE(an_all_reduce_does_not_give_up_amid_a_copy) {
  in_own_process([] { check_slow(all_reduce_it); });
}
CASE(a_send_does_not_give_up_amid_a_copy) {
  in_own_process([] { check_slow(transfer_it); });
}

}  // namespace
}  // namespace fastdist::test
