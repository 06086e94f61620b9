// WorkQueue: order, exceptions, immediate calls in an idle queue.

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "core/work.h"

namespace fastdist::test {
namespace {

using namespace std::chrono_literals;

CASE(calls_run_in_order) {
  std::vector<int> order;  // needs no lock, since calls run one at a time
  WorkQueue queue;
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < 2000; ++i) {
    if (i % 3 == 0 && queue.try_run([&] { order.push_back(i); })) continue;
    works.push_back(queue.submit([&order, i] { order.push_back(i); }));
  }
  for (const auto& work : works) CHECK(work->wait(60s));
  CHECK(order.size() == 2000);
  for (int i = 0; i < 2000; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
}

CASE(calls_that_wake_nobody_run_soon_and_in_order) {
  std::vector<int> order;
  WorkQueue queue;
  std::shared_ptr<Work> last;
  for (int i = 0; i < 300; ++i) {
    if (i % 100 == 50) std::this_thread::sleep_for(5ms);  // the thread sleeps again
    const auto call = [&order, i] { order.push_back(i); };
    last = i % 7 == 0 ? queue.submit(call) : queue.submit_soon(call);
    CHECK(queue.pending() >= 0 && queue.pending() <= 300);
  }
  CHECK(last->wait(60s));
  CHECK(order.size() == 300);
  for (int i = 0; i < 300; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
}

CASE(an_exception_reaches_who_waits) {
  WorkQueue queue;
  const auto bad = queue.submit([] { throw Error(ErrorCode::kTimeout, "late"); });
  const auto good = queue.submit([] {});
  CHECK_THROWS(ErrorCode::kTimeout, (void)bad->wait(60s));
  CHECK_THROWS(ErrorCode::kTimeout, (void)bad->wait(60s));  // throws again
  CHECK(bad->is_done());
  CHECK(good->wait(60s));
}

CASE(try_run_passes_exceptions_and_stays_usable) {
  WorkQueue queue;
  CHECK_THROWS(ErrorCode::kValue,
               (void)queue.try_run([] { throw Error(ErrorCode::kValue, "no"); }));
  bool ran = false;
  CHECK(queue.try_run([&] { ran = true; }));
  CHECK(ran);
}

CASE(a_wait_can_time_out) {
  WorkQueue queue;
  std::promise<void> go;
  const auto work = queue.submit([&] { go.get_future().wait(); });
  CHECK(!work->wait(5ms));
  CHECK(!work->is_done());
  CHECK(!queue.try_run([] { CHECK(false); }));  // a call is pending
  go.set_value();
  CHECK(work->wait(60s));
}

CASE(the_end_waits_for_what_was_submitted) {
  std::atomic<int> ran{0};
  for (int trial = 0; trial < 50; ++trial) {
    WorkQueue queue;
    for (int i = 0; i < 10; ++i) queue.submit([&] { ++ran; });
  }
  CHECK(ran == 500);
}

CASE(one_call_at_a_time_from_many_threads) {
  WorkQueue queue;
  int counter = 0;  // needs no lock
  std::vector<std::thread> threads;
  std::atomic<int> at_once{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        if (queue.try_run([&] { ++counter; })) {
          ++at_once;
        } else {
          CHECK(queue.submit([&] { ++counter; })->wait(60s));
        }
      }
    });
  }
  for (auto& t : threads) t.join();
  CHECK(counter == 2000);
  CHECK(at_once > 0);
}

}  // namespace
}  // namespace fastdist::test
