// Detects ranks that wait for each other for ever, such as one in `barrier` and one in `send`.
//
// A rank that has waited for a second asks all others for their state. A rank answers while it
// waits too, and makes no other call until its wait ends: with the call in which it waits, and how
// many calls of each kind it has begun. A rank that has not answered may still act. A rank can go
// on if all ranks can that have not begun what it waits for. The others, if any, wait for ever: to
// act after its answer, one of them would have had to be the first, but each waits for another one.

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/communicator.h"

namespace fastdist::net {
namespace {

constexpr std::chrono::seconds kPatience{1};
constexpr std::chrono::seconds kAnswerTime{1};
constexpr std::size_t kSiteBytes = 400;

// Precedes, in an answer, the numbers of sends to and receives from each rank, and the caller's
// line.
struct State {
  std::uint64_t sequence;   // collectives begun
  std::uint64_t signature;  // of the call in which the rank waits
  std::uint64_t count;
  std::uint64_t list;
  std::uint32_t number;  // of the transfer, if it waits in one
  std::uint32_t ranks;
  std::uint32_t is_alone;  // no other thread of the rank may act meanwhile
};

struct Waiting {
  State state;
  std::vector<std::uint32_t> sent, received;  // by rank
  std::string site;
  Signature call;
};

std::optional<Waiting> parse(const std::string& text, std::size_t ranks) {
  Waiting waiting;
  if (text.size() < sizeof(State) + 2 * ranks * sizeof(std::uint32_t)) return std::nullopt;
  std::memcpy(&waiting.state, text.data(), sizeof(State));
  if (waiting.state.ranks != ranks) return std::nullopt;
  const char* at = text.data() + sizeof(State);
  for (auto* counts : {&waiting.sent, &waiting.received}) {
    counts->resize(ranks);
    std::memcpy(counts->data(), at, ranks * sizeof(std::uint32_t));
    at += ranks * sizeof(std::uint32_t);
  }
  waiting.site.assign(at, text.data() + text.size());
  waiting.call = unpack_signature(waiting.state.signature, waiting.state.count, waiting.state.list);
  return waiting;
}

// Returns the ranks that have not begun what rank `r` waits for.
std::vector<int> missing_for(int r, const std::vector<std::optional<Waiting>>& ranks) {
  const Waiting& own = *ranks[static_cast<std::size_t>(r)];
  const auto is_missing = [&](int p) {
    const auto& theirs = ranks[static_cast<std::size_t>(p)];
    if (!theirs) return true;
    if (own.call.op == Op::kSend) {
      return theirs->received[static_cast<std::size_t>(r)] < own.state.number;
    }
    if (own.call.op == Op::kRecv) {
      return theirs->sent[static_cast<std::size_t>(r)] < own.state.number;
    }
    return theirs->state.sequence < own.state.sequence;
  };
  std::vector<int> missing;
  const bool is_transfer = own.call.op == Op::kSend || own.call.op == Op::kRecv;
  for (int p = 0; p < static_cast<int>(ranks.size()); ++p) {
    if (p != r && (!is_transfer || p == own.call.root) && is_missing(p)) missing.push_back(p);
  }
  return missing;
}

// Returns the ranks that wait for ever.
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

std::string NetCommunicator::state_of(const Wait& wait) const {
  const State state{sequence_,
                    wait.signature.packed(),
                    wait.signature.count,
                    wait.signature.list,
                    wait.number,
                    static_cast<std::uint32_t>(size()),
                    submitted_.load() == 0 && calls_.load() == 1 ? 1U : 0U};
  std::string text(reinterpret_cast<const char*>(&state), sizeof(state));
  for (const bool sends : {true, false}) {
    for (int p = 0; p < size(); ++p) {
      const std::uint32_t count = p == rank_ ? 0
                                  : sends    ? peer(p).sent.load()
                                             : peer(p).received.load();
      text.append(reinterpret_cast<const char*>(&count), sizeof(count));
    }
  }
  std::string site = wait.caller->location();
  if (site.size() > kSiteBytes) site.erase(0, site.size() - kSiteBytes);
  return text + site;
}

void NetCommunicator::answer_questions(const Wait& wait) {
  std::string own;
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    const auto question = peer(p).answers.take_question();
    if (!question) continue;
    if (own.empty()) own = state_of(wait);
    peer(p).writer.tell_state(*question, own);
  }
}

std::uint64_t NetCommunicator::ask_all() {
  const std::uint64_t question = questions_.fetch_add(1) + 1;
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) peer(p).writer.ask(question);
  }
  return question;
}

// Returns the ranks for which all others wait: those that have not come to this call and do not
// answer; if there are none, those that are in an earlier call; then those that have come and do
// not answer any more, as they have stopped; else `suspects`.
std::vector<int> NetCommunicator::find_late(const Wait& wait, const std::vector<int>& suspects) {
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
      const bool answers_now = answers.state(question).has_value();
      // An answer to an earlier question tells as well that the rank has come.
      const auto state = answers.state(1);
      const auto theirs = state ? parse(*state, places_.size()) : std::nullopt;
      const bool has_come = theirs && theirs->state.sequence >= sequence_;
      if (!has_come) (answers_now ? behind : absent).push_back(p);
      if (has_come && !answers_now) stopped.push_back(p);
    }
    answer_questions(wait);
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
NetCommunicator::CallHead NetCommunicator::last_call(int p) const {
  const CallHead& known = last_[static_cast<std::size_t>(p)];
  if (p == rank_) return known;
  const auto answer = peer(p).answers.state(1);
  const auto theirs = answer ? parse(*answer, places_.size()) : std::nullopt;
  if (!theirs || theirs->state.number != 0 || theirs->state.sequence <= known.sequence) {
    return known;
  }
  return {theirs->state.sequence, theirs->state.signature, theirs->state.count, theirs->state.list};
}

// Called regularly by the thread that waits.
void NetCommunicator::check_deadlock(Wait& wait) {
  answer_questions(wait);
  if (submitted_.load(std::memory_order_acquire) != 0 || calls_.load() > 1) {
    return;  // another thread may act
  }
  const auto now = Clock::now();
  if (now - wait.since < kPatience) return;
  if (wait.question == 0 || now - wait.asked_at > kPatience) {
    wait.question = ask_all();
    wait.asked_at = now;
    return;
  }
  std::vector<std::optional<Waiting>> ranks(places_.size());
  const auto n = places_.size();
  for (int p = 0; p < size(); ++p) {
    const auto answer = p == rank_ ? state_of(wait) : peer(p).answers.state(wait.question);
    auto parsed = answer ? parse(*answer, n) : std::nullopt;
    if (parsed && parsed->state.is_alone != 0) ranks[static_cast<std::size_t>(p)] = *parsed;
  }
  std::vector<int> stuck = find_stuck(ranks);
  if (std::find(stuck.begin(), stuck.end(), rank_) == stuck.end()) return;
  std::vector<std::optional<WaitOfRank>> waits(n);
  for (int p = 0; p < size(); ++p) {
    const auto& rank = ranks[static_cast<std::size_t>(p)];
    if (!rank) continue;
    const std::vector<int> missing = missing_for(p, ranks);
    waits[static_cast<std::size_t>(p)] = {
        rank->call, missing.empty() ? std::nullopt : std::optional(missing.front()), rank->site};
  }
  fail({.kind = FailureKind::kDeadlock,
        .ranks = std::move(stuck),
        .noticed_by = rank_,
        .detail = describe_waits(waits, rank_)},
       wait.signature);
}

}  // namespace fastdist::net
