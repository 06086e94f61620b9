// Detects that a call cannot finish, tells the other ranks and composes the error.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "net/communicator.h"

namespace fastdist::net {
namespace {

// What does not concern the current wait must last so long before it ends the call: a rank that
// exits may have finished a call that others are about to finish.
constexpr std::chrono::milliseconds kDoubt{500};
// A machine that has not answered the kernel for so long when a timeout is reached is to blame.
constexpr std::chrono::milliseconds kSilence{1500};

std::string seconds(std::chrono::nanoseconds duration) {
  std::string text = std::to_string(std::chrono::duration<double>(duration).count());
  text.resize(text.find('.') + 2);
  return text + " s";
}

std::string names(const std::vector<int>& ranks) {
  std::string text;
  for (const int p : ranks) text += (text.empty() ? "" : ", ") + std::to_string(p);
  return text;
}

}  // namespace

void NetCommunicator::check_usable() const {
  if (generation_ != process_generation()) {
    throw Error(ErrorCode::kState,
                "the communicator belongs to the parent process; a forked child cannot use it");
  }
  const std::lock_guard lock(failure_mutex_);
  if (failure_) {
    throw Error(failure_->code(),
                "the communicator cannot be used any more on rank " + std::to_string(rank_) +
                    ", make a new one: in an earlier call, " + failure_->what(),
                failure_->ranks());
  }
  if (is_closed_) {
    throw Error(ErrorCode::kState, "the communicator is closed on rank " + std::to_string(rank_));
  }
}

std::optional<int> NetCommunicator::find_lost() const noexcept {
  for (int p = 0; p < size(); ++p) {
    if (is_here(p)) continue;
    Peer& them = *peers_[static_cast<std::size_t>(p)];
    AnswerReader& answers = them.answers;
    if (!them.sends.load(std::memory_order_acquire)) answers.poll();
    if (answers.failure() || (answers.has_ended() && !answers.has_closed())) return p;
  }
  const auto lost = inner_->find_lost();
  if (!lost) return std::nullopt;
  return ranks_of(machine_of(rank_))[static_cast<std::size_t>(*lost)];
}

// Throws if a rank has given up or died: the call cannot finish, whoever this rank waits for.
void NetCommunicator::check_failures(Wait& wait) {
  const Signature& signature = wait.signature;
  check_usable();
  if (const auto cause = inner_->find_cause()) throw_noticed(*cause, -1, signature);
  const std::int64_t now = Clock::now().time_since_epoch().count();
  // Returns true if something that was first noticed at `since` has lasted.
  const auto lasts = [this, now](std::atomic<std::int64_t>& since) {
    std::int64_t first = 0;
    if (since.compare_exchange_strong(first, now)) return false;
    return Clock::duration(now - std::max(first, moved_at_.load())) > kDoubt;
  };
  if (const auto dead = inner_->find_dead(); dead && lasts(dead_at_)) {
    const int p = ranks_of(machine_of(rank_))[static_cast<std::size_t>(*dead)];
    fail(Error(ErrorCode::kPeerFailure, "rank " + std::to_string(p) + " has died", {p}), signature);
  }
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    Peer& them = peer(p);
    if (!them.sends.load(std::memory_order_acquire)) them.answers.poll();
    if (const auto cause = them.answers.failure()) throw_noticed(*cause, p, signature);
    if (is_here(p) || !them.answers.has_ended() || them.answers.has_closed()) continue;
    if (lasts(them.ended_at)) throw_ended(p, signature);
  }
  warn_of_silence(wait);
  check_deadlock(wait);
}

// Warns, once in a call, of machines from which nothing has come for long.
void NetCommunicator::warn_of_silence(Wait& wait) {
  constexpr std::chrono::seconds kSilence{10};
  if (wait.has_warned || Clock::now() - wait.since < kSilence) return;
  for (int machine = 0; machine < machines(); ++machine) {
    const std::vector<int>& ranks = ranks_of(machine);
    const bool is_cut =
        machine != machine_of(rank_) &&
        std::all_of(ranks.begin(), ranks.end(), [&](int p) { return is_unreachable(p, kSilence); });
    if (!is_cut) continue;
    wait.has_warned = true;
    wait.caller->warn(prefix(wait.signature) + " has heard nothing from the machine " +
                      places_[static_cast<std::size_t>(ranks.front())].ip + " of rank " +
                      names(ranks) + " for " + std::to_string(kSilence.count()) +
                      " s. Its network may be down; the call goes on once it is back.");
  }
}

// Throws since rank p has closed the communicator, died or given up.
void NetCommunicator::throw_ended(int p, const Signature& signature) {
  const std::string who = "rank " + std::to_string(p);
  AnswerReader& answers = peer(p).answers;
  const auto start = Clock::now();
  for (;;) {  // the answers may be on their way
    answers.poll();
    if (const auto cause = answers.failure()) throw_noticed(*cause, p, signature);
    if (const auto cause = inner_->find_cause()) throw_noticed(*cause, -1, signature);
    if (answers.has_closed()) {
      fail(Error(ErrorCode::kPeerFailure, who + " has closed the communicator", {p}), signature);
    }
    if (answers.has_ended() || Clock::now() - start > kDoubt) {
      fail(Error(ErrorCode::kPeerFailure, who + " has died or lost its connection", {p}),
           signature);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void NetCommunicator::throw_malformed(int p, const Signature& signature) {
  fail(Error(ErrorCode::kPeerFailure, "rank " + std::to_string(p) + " has sent a malformed header",
             {p}),
       signature);
}

void NetCommunicator::throw_late(int p, Wait& wait, Clock::duration waited) {
  const Signature& signature = wait.signature;
  if (is_unreachable(p, kSilence)) {
    std::vector<int> ranks = ranks_of(machine_of(p));
    const std::string text = "the machine " + places_[static_cast<std::size_t>(p)].ip +
                             " of rank " + names(ranks) + " cannot be reached";
    fail(Error(ErrorCode::kPeerFailure, text, std::move(ranks)), signature);
  }
  const std::vector<int> late = find_late(wait, {p});
  const std::string who = "waiting for rank " + names(late);
  abandon(Error(ErrorCode::kTimeout, "rank " + std::to_string(rank_) + " gave up " + who, late));
  throw Error(ErrorCode::kTimeout,
              prefix(signature) + " reached its timeout after " + seconds(waited) + " " + who +
                  last_calls(),
              late);
}

// The kernel has asked the machine of rank p, and has heard nothing from it for `silence`.
bool NetCommunicator::is_unreachable(int p, std::chrono::milliseconds silence) const {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (::getsockopt(peer(p).stream.fd(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  const bool asks = info.tcpi_probes != 0 || info.tcpi_backoff != 0 || info.tcpi_retransmits != 0;
  return asks && info.tcpi_last_ack_recv > silence.count();
}

// Throws for an error of a call between the ranks of this machine.
void NetCommunicator::throw_inner(const Error& error, Wait& wait) {
  const Signature& signature = wait.signature;
  {
    const std::lock_guard lock(failure_mutex_);
    if (failure_) throw error;  // thrown by this rank's own checks
  }
  if (const auto cause = inner_->find_cause()) throw_noticed(*cause, -1, signature);
  check_usable();
  const std::vector<int>& ranks = error.ranks();
  const std::string who = "rank " + names(ranks);
  const std::string text = error.what();
  switch (error.code()) {
    case ErrorCode::kTimeout: {
      const std::vector<int> late = find_late(wait, ranks);
      const std::string whom = "waiting for rank " + names(late);
      abandon(Error(error.code(), "rank " + std::to_string(rank_) + " gave up " + whom, late));
      throw Error(error.code(), text.substr(0, text.find("waiting for")) + whom + last_calls(),
                  late);
    }
    case ErrorCode::kPeerFailure: {
      std::string what = " has died";
      for (const char* known : {" has closed the communicator", " was interrupted"}) {
        if (text.find(known) != std::string::npos) what = known;
      }
      fail(Error(error.code(), who + what, ranks), signature);
    }
    case ErrorCode::kMismatch:  // of a send and a recv, after which all is usable
      throw error;
    default:
      fail(error, signature);
  }
}

// Throws for the cause that rank `noticed_by` has told; -1 for a rank of this machine.
void NetCommunicator::throw_noticed(const Error& cause, int noticed_by,
                                    const Signature& signature) {
  const auto& ranks = cause.ranks();
  std::string text = cause.what();
  const bool blames_self = std::find(ranks.begin(), ranks.end(), rank_) != ranks.end();
  if (blames_self && cause.code() == ErrorCode::kPeerFailure) {
    // This rank lives: only its connections can be lost.
    const bool is_known = noticed_by >= 0;
    fail(Error(cause.code(),
               (is_known ? "rank " + std::to_string(noticed_by) : std::string("another rank")) +
                   " has lost the connection to this rank",
               is_known ? std::vector{noticed_by} : std::vector<int>{}),
         signature);
  }
  const bool knows = std::find(ranks.begin(), ranks.end(), noticed_by) != ranks.end();
  if (noticed_by >= 0 && !knows && cause.code() != ErrorCode::kTimeout &&
      text.find("(noticed by") == std::string::npos) {
    text += " (noticed by rank " + std::to_string(noticed_by) + ")";
  }
  fail(Error(cause.code(), text, ranks), signature);
}

void NetCommunicator::fail(const Error& cause, const Signature& signature) {
  abandon(cause);
  throw Error(cause.code(), prefix(signature) + ": " + cause.what() + last_calls(), cause.ranks());
}

// Makes the communicator unusable, and tells the other ranks why.
void NetCommunicator::abandon(const Error& cause) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    if (failure_) return;
    failure_ = cause;
  }
  inner_->abandon(cause);
  for (const auto& peer : peers_) {
    if (peer) peer->writer.tell_failure(cause);
  }
}

std::string NetCommunicator::prefix(const Signature& signature) const {
  return describe(signature) + " on rank " + std::to_string(rank_);
}

std::string NetCommunicator::last_calls() const {
  std::string text = "; last collective of each rank:";
  for (int p = 0; p < size(); ++p) {
    const CallHead last = last_call(p);
    text += "\n  rank " + std::to_string(p) + ": ";
    text += last.sequence == 0
                ? "none"
                : "call " + std::to_string(last.sequence) + ", " +
                      describe(unpack_signature(last.signature, last.count, last.list));
  }
  return text;
}

}  // namespace fastdist::net
