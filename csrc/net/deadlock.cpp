// Detects ranks that wait for each other forever, such as one in `barrier` and one in `send`.
//
// A rank that has waited for a second asks all others for their state. A waiting rank answers with
// the call in which it waits and the number of calls of each kind that it has begun; it makes no
// other call until its wait ends. A rank that has not answered may still act. A rank can proceed if
// every rank that has not started the call it waits for can proceed. Ranks that cannot proceed are
// deadlocked: one of them would have to act first, but each waits for another.
//
// A process with a single thread that waits in one communicator also answers in its other ones. It
// sends the random numbers of the waits that it depends on, because a rank has another number in
// each communicator. Such a rank is deadlocked if one of these waits is, and if that wait's own
// rank still answers with the same number. The rank that finds the deadlock reports it to the ranks
// that wait in other communicators, which would not see its failure.

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/process.h"
#include "net/answers.h"
#include "net/communicator.h"

namespace fastdist::net {
namespace {

constexpr std::chrono::seconds kPatience{1};
constexpr std::chrono::seconds kAnswerTime{1};
constexpr std::size_t kSiteBytes = 400;

// Returns the ranks that have not started the call that rank `r` waits for.
std::vector<int> missing_for(int r, const std::vector<std::optional<Waiting>>& ranks) {
  const Waiting& own = *ranks[static_cast<std::size_t>(r)];
  const Signature call = own.state.head.call();
  const bool is_elsewhere = own.state.is_elsewhere != 0;
  const auto is_missing = [&](int p) {
    const auto& theirs = ranks[static_cast<std::size_t>(p)];
    if (is_elsewhere) return theirs && std::ranges::count(own.awaited, theirs->state.id) != 0;
    if (!theirs) return true;
    if (call.op == Op::kSend) {
      return theirs->received[static_cast<std::size_t>(r)] < own.state.number;
    }
    if (call.op == Op::kRecv) {
      return theirs->sent[static_cast<std::size_t>(r)] < own.state.number;
    }
    return theirs->state.head.sequence < own.state.head.sequence;
  };
  std::vector<int> missing;
  const bool is_transfer = !is_elsewhere && is_one_of(call.op, {Op::kSend, Op::kRecv});
  for (int p = 0; p < static_cast<int>(ranks.size()); ++p) {
    if (p != r && (!is_transfer || p == call.root) && is_missing(p)) missing.push_back(p);
  }
  return missing;
}

// Returns the deadlocked ranks. A rank that waits in another communicator can proceed if none of
// the waits that it depends on belongs to a rank of this communicator.
std::vector<int> find_stuck(const std::vector<std::optional<Waiting>>& ranks) {
  std::vector<bool> goes_on;
  for (const auto& rank : ranks) goes_on.push_back(!rank);
  for (bool changes = true; changes;) {
    changes = false;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      if (goes_on[r]) continue;
      const std::vector<int> missing = missing_for(static_cast<int>(r), ranks);
      goes_on[r] = std::all_of(missing.begin(), missing.end(),
                               [&](int p) { return goes_on[static_cast<std::size_t>(p)]; });
      changes |= goes_on[r];
    }
  }
  std::vector<int> stuck;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (!goes_on[r]) stuck.push_back(static_cast<int>(r));
  }
  return stuck;
}

}  // namespace

// Returns the caller's line. The first call may take the GIL.
const std::string& NetCommunicator::line_of(Wait& wait) {
  if (!wait.site) {
    std::string site = wait.caller->location();
    if (site.size() > kSiteBytes) site.erase(0, site.size() - kSiteBytes);
    wait.site = std::move(site);
  }
  return *wait.site;
}

// Returns the state of this rank, which waits in `waiting`: this communicator or another one.
Waiting NetCommunicator::state_of(Wait& wait, NetCommunicator& waiting) const {
  if (wait.id == 0) {
    std::random_device random;
    wait.id = std::uint64_t{random()} << 32 | random();
  }
  const bool is_elsewhere = &waiting != this;
  std::vector<std::uint64_t> awaited;
  if (is_elsewhere) {
    const auto ranks = waiting.answers_in(wait);
    for (const int p : waiting.missing_in(wait)) {
      const auto& theirs = ranks[static_cast<std::size_t>(p)];
      if (theirs && theirs->state.id != 0 && awaited.size() < kMostAwaited) {
        awaited.push_back(theirs->state.id);
      }
    }
  }
  const bool is_alone = is_elsewhere || (submitted_.load() == 0 && calls_.load() == 1 &&
                                         wait.caller->is_only_caller());
  Waiting own{};
  own.state = {.head = head_of(wait.signature),
               .id = is_elsewhere || wait.caller->is_alone() ? wait.id : 0,
               .number = is_elsewhere ? 0 : wait.number,
               .ranks = static_cast<std::uint32_t>(size()),
               .is_alone = is_alone ? 1U : 0U,
               .is_elsewhere = is_elsewhere ? 1U : 0U,
               .awaited = static_cast<std::uint32_t>(awaited.size()),
               .unused = 0};
  for (int p = 0; p < size(); ++p) {
    own.sent.push_back(p == rank_ ? 0 : peer(p).sent.load());
    own.received.push_back(p == rank_ ? 0 : peer(p).received.load());
  }
  own.awaited = std::move(awaited);
  own.site = line_of(wait);
  return own;
}

void NetCommunicator::answer_questions(Wait& wait, NetCommunicator& waiting) {
  std::string own;
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    const auto question = peer(p).answers.take_question();
    if (!question) continue;
    if (own.empty()) own = serialize(state_of(wait, waiting));
    peer(p).writer.tell(AnswerKind::kState, *question, own);
  }
}

// Answers in this process's other communicators, if it makes no call there before the wait ends.
void NetCommunicator::speak_elsewhere(Wait& wait) {
  if (!wait.caller->is_alone()) return;
  std::optional<std::string> deadlock;
  const auto for_each_other = [&](auto&& function) {
    Registry<NetCommunicator>::for_each([&](NetCommunicator& other) {
      if (&other != this && !other.is_closed_) function(other);
    });
  };
  for_each_other([&](NetCommunicator& other) {
    for (int p = 0; p < other.size(); ++p) {
      if (p == other.rank_) continue;
      AnswerReader& answers = other.peer(p).answers;
      answers.poll();
      if (wait.id != 0 && !deadlock) deadlock = answers.deadlock_of(wait.id);
    }
  });
  if (!deadlock) {
    (void)line_of(wait);  // not under the registry's lock
    return for_each_other([&](NetCommunicator& other) { other.answer_questions(wait, *this); });
  }
  std::vector<int> ranks = missing_in(wait);
  ranks.push_back(rank_);
  fail({FailureKind::kDeadlockElsewhere, std::move(ranks), rank_, {}, *deadlock}, wait.signature);
}

// Returns the answers of all ranks in this wait, its own among them. A rank is left out whose
// other threads may act.
std::vector<std::optional<Waiting>> NetCommunicator::answers_in(Wait& wait) {
  std::vector<std::optional<Waiting>> ranks(places_.size());
  for (int p = 0; p < size(); ++p) {
    std::optional<Waiting> answer;
    if (p == rank_) {
      answer = state_of(wait, *this);
    } else if (wait.question != 0) {
      answer = peer(p).answers.state(wait.question);
    }
    if (answer && answer->state.is_alone != 0) {
      ranks[static_cast<std::size_t>(p)] = std::move(answer);
    }
  }
  return ranks;
}

// Returns the ranks for which this rank waits.
std::vector<int> NetCommunicator::missing_in(Wait& wait) {
  const auto ranks = answers_in(wait);
  return ranks[static_cast<std::size_t>(rank_)] ? missing_for(rank_, ranks) : std::vector<int>{};
}

std::uint64_t NetCommunicator::ask_all() {
  const std::uint64_t question = questions_.fetch_add(1) + 1;
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) peer(p).writer.tell(AnswerKind::kQuestion, question);
  }
  return question;
}

// Returns the ranks that all others wait for, by the first rule that names any: ranks that have not
// arrived at this call and do not answer; ranks in an earlier call; ranks that have arrived but
// have stopped answering; `suspects`.
std::vector<int> NetCommunicator::find_late(Wait& wait, const std::vector<int>& suspects) {
  const std::uint64_t question = ask_all();
  std::vector<int> absent, behind, stopped;
  for (const auto end = Clock::now() + kAnswerTime; Clock::now() < end;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    absent.clear();
    behind.clear();
    stopped.clear();
    for (int p = 0; p < size(); ++p) {
      if (p == rank_) continue;
      AnswerReader& answers = peer(p).answers;
      answers.poll();
      if (const auto told = answers.failure()) throw_told(*told, wait.signature);
      const bool answers_now = answers.has_answered(question);
      // An answer to an earlier question also shows that the rank has arrived.
      const auto theirs = answers.state(1);
      const bool has_come = theirs && theirs->state.head.sequence >= sequence_;
      if (!has_come) (answers_now ? behind : absent).push_back(p);
      if (has_come && !answers_now) stopped.push_back(p);
    }
    answer_questions(wait, *this);
    if (absent.empty() && stopped.empty()) break;
  }
  if (wait.number != 0) return suspects;  // a transfer needs one rank alone
  for (const std::vector<int>* late : {&absent, &behind, &stopped}) {
    if (!late->empty()) return *late;
  }
  return suspects;
}

// Returns the last collective of rank p that is known here: from its record in a crossing, or from
// its last answer.
CallHead NetCommunicator::last_call(int p) const {
  const CallHead& known = last_[static_cast<std::size_t>(p)];
  if (p == rank_) return known;
  const auto theirs = peer(p).answers.state(1);
  const bool is_later = theirs && theirs->state.number == 0 && theirs->state.is_elsewhere == 0 &&
                        theirs->state.head.sequence > known.sequence;
  return is_later ? theirs->state.head : known;
}

// Called regularly by the thread that waits.
void NetCommunicator::check_deadlock(Wait& wait) {
  answer_questions(wait, *this);
  if (submitted_.load(std::memory_order_acquire) != 0 || calls_.load() > 1) return;
  if (!wait.caller->is_only_caller()) return;  // another thread may act
  const auto now = Clock::now();
  if (now - wait.since < kPatience) return;
  speak_elsewhere(wait);
  if (wait.question == 0 || now - wait.asked_at > kPatience) {
    wait.question = ask_all();
    wait.asked_at = now;
    return;
  }
  const auto ranks = answers_in(wait);
  std::vector<int> stuck = find_stuck(ranks);
  if (std::find(stuck.begin(), stuck.end(), rank_) == stuck.end()) return;
  std::vector<WaitOfRank> waits;
  for (int p = 0; p < size(); ++p) {
    const auto& rank = ranks[static_cast<std::size_t>(p)];
    waits.push_back({.rank = p});
    if (!rank) continue;
    const std::vector<int> missing = missing_for(p, ranks);
    waits.back() = {p, rank->state.head.call(),
                    missing.empty() ? std::nullopt : std::optional(missing.front()), rank->site,
                    rank->state.is_elsewhere != 0};
  }
  const std::string detail = describe_waits(waits, rank_, size());
  for (const int p : stuck) {
    const State& state = ranks[static_cast<std::size_t>(p)]->state;
    if (state.is_elsewhere != 0) peer(p).writer.tell(AnswerKind::kDeadlock, state.id, detail);
  }
  fail({FailureKind::kDeadlock, std::move(stuck), rank_, {}, detail}, wait.signature);
}

}  // namespace fastdist::net
