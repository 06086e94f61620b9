// What ranks tell each other about failures, and what users read about them.

#include <string>
#include <vector>

#include "check.h"
#include "core/failure.h"

namespace fastdist::test {
namespace {

using fastdist::Failure;
using Kind = FailureKind;

const Signature kCall = rooted(Op::kRecv, 1);

std::string in_call(const Failure& failure, int rank) {
  const std::string text = error_in(failure, {.op = Op::kBarrier}, rank, {}).what();
  const std::string prefix = "barrier() on rank " + std::to_string(rank) + ": ";
  return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
}

void check_text(const std::string& got, const std::string& expected) {
  CHECK_THAT(got == expected, got);
}

CASE(peers_are_blamed_by_what_has_happened_to_them) {
  check_text(in_call({Kind::kDied, {2}, 0}, 0), "rank 2 has died");
  check_text(in_call({Kind::kDied, {2}, 0}, 1), "rank 2 has died (noticed by rank 0)");
  check_text(in_call({Kind::kClosed, {2}, 2}, 1), "rank 2 has closed the communicator");
  check_text(in_call({Kind::kLost, {2}, 0}, 0), "rank 2 has died or lost its connection");
  check_text(in_call({Kind::kCutOff, {2}, 0}, 0), "rank 2 has lost the connection to this rank");
  check_text(in_call({Kind::kCutOff, {2}, 0}, 1), "rank 2 has lost the connection to rank 0");
  check_text(in_call({Kind::kMalformed, {2}, 0}, 0), "rank 2 has sent a malformed header");
  check_text(in_call({.kind = Kind::kUnreachable, .ranks = {2, 3}, .detail = "10.0.0.7"}, 0),
             "the machine 10.0.0.7 of rank 2, 3 cannot be reached");
  const Error error = error_in({Kind::kDied, {2}, 0}, kCall, 1, {});
  CHECK(error.code() == ErrorCode::kPeerFailure && error.ranks() == std::vector<int>{2});
}

CASE(only_an_interrupted_rank_reads_that_it_was_interrupted) {
  const Failure failure{Kind::kInterrupted, {1}, 1};
  check_text(in_call(failure, 0), "rank 1 was interrupted");
  CHECK(error_after(failure, 0).code() == ErrorCode::kPeerFailure);
  const Error own = error_after(failure, 1);
  check_text(own.what(),
             "the communicator cannot be used any more on rank 1, make a new one: in an earlier "
             "call, this rank was interrupted");
  CHECK(own.code() == ErrorCode::kState && own.ranks().empty());
}

CASE(a_timeout_reads_differently_where_it_passed) {
  const Failure failure{Kind::kTimeout, {2, 3}, 1, std::chrono::milliseconds(1520)};
  check_text(in_call(failure, 1),
             "barrier() on rank 1 reached its timeout after 1.5 s waiting for rank 2, 3");
  check_text(in_call(failure, 2), "rank 1 gave up waiting for rank 2, 3");
  CHECK(std::string(error_after(failure, 1).what()).ends_with("rank 2, 3 did not come in time"));
  CHECK(error_in(failure, kCall, 2, {}).code() == ErrorCode::kTimeout);
}

CASE(calls_on_gpus_say_what_they_waited_for) {
  const Failure late{Kind::kUnfinished, {}, 1, std::chrono::milliseconds(500)};
  check_text(in_call(late, 1),
             "barrier() has not finished on rank 1 within 0.5 s: a rank has not called it, is late "
             "or has died; the communicator was aborted");
  CHECK(error_in(late, kCall, 1, {}).code() == ErrorCode::kTimeout);
  check_text(in_call({Kind::kAborted, {0}, 1}, 1),
             "rank 0 has died or aborted while calls on GPUs waited for it; the communicator was "
             "aborted");
}

CASE(the_last_calls_follow) {
  const std::vector<LastCall> calls{{0, 0, {}}, {1, 7, {.op = Op::kBarrier}}};
  check_text(error_in({Kind::kDied, {1}, 0}, kCall, 0, calls).what(),
             "recv(uint8 × 0, src=1) on rank 0: rank 1 has died; last collective of each rank:\n"
             "  rank 0: none\n  rank 1: call 7, barrier()");
}

CASE(a_deadlock_is_the_same_on_all_ranks) {
  const std::vector<WaitOfRank> waits = {
      {0, Signature{.op = Op::kBarrier}, 1, "train.py:3"}, {1, kCall}, {2}};
  const Failure failure{
      .kind = Kind::kDeadlock, .ranks = {0, 1}, .detail = describe_waits(waits, 0, 3)};
  for (const int rank : {0, 1, 2}) {
    const Error error = error_in(failure, kCall, rank, {});
    check_text(error.what(),
               "ranks wait for each other, and none of their calls can end (seen from rank 0 of "
               "3):\n  rank 0: barrier(), for rank 1 at train.py:3\n"
               "  rank 1: recv(uint8 × 0, src=1)\n  rank 2: not waiting yet");
    CHECK(error.code() == ErrorCode::kMismatch);
    for (const int p : error.ranks()) CHECK(p != rank);
  }
}

CASE(a_deadlock_found_elsewhere_names_its_own_ranks) {
  const Failure failure{
      .kind = Kind::kDeadlockElsewhere, .ranks = {0, 2}, .noticed_by = 2, .detail = " (…)"};
  const Error error = error_in(failure, kCall, 2, {});
  check_text(error.what(),
             "ranks wait for each other, and none of their calls can end, by their numbers in "
             "another communicator (…)");
  CHECK(error.code() == ErrorCode::kMismatch);
  CHECK(error.ranks() == std::vector<int>{0});
}

CASE(a_failure_arrives_as_it_was_told) {
  for (std::uint32_t kind = 0; kind <= static_cast<std::uint32_t>(Kind::kError); ++kind) {
    const Failure told{static_cast<Kind>(kind),
                       {2, 0},
                       1,
                       std::chrono::seconds(3),
                       "was interrupted (noticed by waiting for",  // words decide nothing
                       ErrorCode::kMemory};
    FailureRecord record{};
    write(told, record);
    const auto heard = read(bytes_of(record), 3);
    CHECK(heard && heard->kind == told.kind && heard->ranks == told.ranks);
    CHECK(heard->noticed_by == 1 && heard->waited == told.waited);
    CHECK(heard->detail == told.detail && heard->code == told.code);
    CHECK(code_of(*heard) == code_of(told));
    check_text(in_call(*heard, 0), in_call(told, 0));
  }
}

CASE(what_no_rank_tells_is_refused) {
  FailureRecord good{};
  write({.kind = Kind::kTimeout, .ranks = {2}, .noticed_by = 1, .detail = "detail"}, good);
  const auto is_refused = [&](auto&& change) {
    FailureRecord record = good;
    change(record);
    return !read(record, 3);
  };
  CHECK(!is_refused([](FailureRecord&) {}));
  CHECK(
      is_refused([](FailureRecord& r) { r.kind = static_cast<std::uint32_t>(Kind::kError) + 1; }));
  CHECK(is_refused([](FailureRecord& r) { r.code = 10; }));
  CHECK(is_refused([](FailureRecord& r) { r.noticed_by = 3; }));
  CHECK(is_refused([](FailureRecord& r) { r.noticed_by = -1; }));
  CHECK(is_refused([](FailureRecord& r) { r.failed[0] = 3; }));
  CHECK(is_refused([](FailureRecord& r) { r.ranks = 257; }));
  CHECK(is_refused([](FailureRecord& r) { r.bytes = 16001; }));
  CHECK(is_refused([](FailureRecord& r) { r.seconds = -1; }));
  CHECK(is_refused([](FailureRecord& r) { r.seconds = std::stod("nan"); }));
  const std::string_view bytes = bytes_of(good);
  CHECK(read(bytes, 3));
  CHECK(!read(bytes.substr(1), 3));  // shorter than it says
  CHECK(!read("", 3));
  CHECK(!read(std::string(sizeof(FailureRecord) + 1, 'x'), 3));
}

CASE(what_does_not_fit_is_cut) {
  FailureRecord record{};
  write(
      {.kind = Kind::kDeadlock, .ranks = std::vector<int>(300), .detail = std::string(20'000, 'x')},
      record);
  const auto heard = read(bytes_of(record), 300);
  CHECK(heard && heard->ranks.size() == 256 && heard->detail.size() == 16'000);
}

}  // namespace
}  // namespace fastdist::test
