// Detects that a call cannot finish, tells the other ranks and composes the error.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <thread>

#include "net/communicator.h"

namespace fastdist::net {
namespace {

// A failure outside the current wait must last this long before it ends the call: a rank that exits
// may have finished a call that others are about to finish.
constexpr std::chrono::milliseconds kDoubt{500};
// When a timeout is reached, a machine is blamed if it has not answered the kernel for this long.
constexpr std::chrono::milliseconds kSilence{1500};

}  // namespace

void NetCommunicator::check_usable() const {
  if (generation_ != process_generation()) throw error_if_forked();
  const std::lock_guard lock(failure_mutex_);
  if (failure_) throw error_after(*failure_, rank_);
  if (is_closed_) throw error_if_closed(rank_);
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

bool NetCommunicator::has_closed(int p) const noexcept {
  return is_here(p) ? inner_->has_closed(local_of(p)) : peer(p).answers.has_closed();
}

// Throws if any rank has given up or died: the call cannot finish then, even if this rank waits for
// a different rank.
void NetCommunicator::check_failures(Wait& wait) {
  const Signature& signature = wait.signature;
  check_usable();
  if (const auto told = inner_->find_told()) throw_told(*told, signature);
  const std::int64_t now = Clock::now().time_since_epoch().count();
  // Returns true if a condition that was first noticed at `since` has lasted long enough.
  const auto lasts = [this, now](std::atomic<std::int64_t>& since) {
    std::int64_t first = 0;
    if (since.compare_exchange_strong(first, now)) return false;
    return Clock::duration(now - std::max(first, moved_at_.load())) > kDoubt;
  };
  if (const auto dead = inner_->find_dead(); dead && lasts(dead_at_)) {
    const int p = ranks_of(machine_of(rank_))[static_cast<std::size_t>(*dead)];
    fail({FailureKind::kDied, {p}, rank_}, signature);
  }
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    Peer& them = peer(p);
    if (!them.sends.load(std::memory_order_acquire)) them.answers.poll();
    if (const auto told = them.answers.failure()) throw_told(*told, signature);
    if (is_here(p) || !them.answers.has_ended() || them.answers.has_closed()) continue;
    if (lasts(them.ended_at)) throw_ended(p, signature);
  }
  check_silence(wait);
  check_deadlock(wait);
}

// Throws if a machine counts as lost, because it has been silent for too long.
void NetCommunicator::check_silence(const Wait& wait) {
  if (patience_.count() == 0) return;
  for (int machine = 0; machine < machines(); ++machine) {
    if (machine == machine_of(rank_)) continue;
    const std::vector<int>& ranks = ranks_of(machine);
    const auto is_silent = [&](int p) { return is_unreachable(p, patience_); };
    if (std::all_of(ranks.begin(), ranks.end(), is_silent)) throw_unreachable(ranks.front(), wait);
  }
}

// Throws because rank p has closed the communicator, died or given up.
void NetCommunicator::throw_ended(int p, const Signature& signature) {
  AnswerReader& answers = peer(p).answers;
  const auto start = Clock::now();
  for (;;) {  // the answers may be on their way
    answers.poll();
    if (const auto told = answers.failure()) throw_told(*told, signature);
    if (const auto told = inner_->find_told()) throw_told(*told, signature);
    if (answers.has_closed()) fail({FailureKind::kClosed, {p}, rank_}, signature);
    if (answers.has_ended() || Clock::now() - start > kDoubt) {
      fail({FailureKind::kLost, {p}, rank_}, signature);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void NetCommunicator::throw_late(int p, Wait& wait, Clock::duration waited) {
  if (is_unreachable(p, kSilence)) throw_unreachable(p, wait);
  fail({FailureKind::kTimeout, find_late(wait, {p}), rank_, waited}, wait.signature);
}

void NetCommunicator::throw_unreachable(int p, const Wait& wait) {
  const std::string& ip = places_[static_cast<std::size_t>(p)].ip;
  fail({FailureKind::kUnreachable, ranks_of(machine_of(p)), rank_, {}, ip}, wait.signature);
}

// Returns true if rank p's machine has not answered the kernel's probes for `silence`.
bool NetCommunicator::is_unreachable(int p, std::chrono::milliseconds silence) const {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (::getsockopt(peer(p).stream.fd(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  const bool asks = info.tcpi_probes != 0 || info.tcpi_backoff != 0 || info.tcpi_retransmits != 0;
  return asks && info.tcpi_last_ack_recv > silence.count();
}

// Throws the failure behind an error that a call between the ranks of this machine has thrown.
void NetCommunicator::throw_inner(const Error& error, Wait& wait) {
  const Signature& signature = wait.signature;
  {
    const std::lock_guard lock(failure_mutex_);
    if (failure_) throw error;  // thrown by this rank's own checks
  }
  if (const auto told = inner_->find_told()) throw_told(*told, signature);
  check_usable();
  auto failure = inner_->failure();
  if (!failure) {
    // A mismatch of send and recv leaves the communicator usable.
    if (error.code() == ErrorCode::kMismatch) throw error;
    failure = {FailureKind::kError, error.ranks(), rank_, {}, error.what(), error.code()};
  }
  // The late rank of this machine may itself wait for a rank of another machine.
  if (failure->kind == FailureKind::kTimeout) failure->ranks = find_late(wait, failure->ranks);
  throw_told(*failure, signature);
}

// Throws for a failure that another rank has reported or that was noticed on this machine.
void NetCommunicator::throw_told(const Failure& failure, const Signature& signature) {
  const auto& ranks = failure.ranks;
  const bool blames_self = std::find(ranks.begin(), ranks.end(), rank_) != ranks.end();
  if (blames_self && code_of(failure) == ErrorCode::kPeerFailure) {
    // This rank is alive, so only its connections can be lost.
    fail({FailureKind::kCutOff, {failure.noticed_by}, rank_}, signature);
  }
  fail(failure, signature);
}

void NetCommunicator::fail(const Failure& failure, const Signature& signature) {
  abandon(failure);
  throw error_in(failure, signature, rank_, last_calls());
}

// Makes the communicator unusable, and tells the other ranks why.
void NetCommunicator::abandon(const Failure& failure) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    if (failure_) return;
    failure_ = failure;
  }
  inner_->abandon(failure);
  for (const auto& peer : peers_) {
    if (peer) peer->writer.tell_failure(failure);
  }
}

std::vector<LastCall> NetCommunicator::last_calls() const {
  std::vector<LastCall> calls;
  for (int p = 0; p < size(); ++p) {
    const CallHead last = last_call(p);
    calls.push_back({p, last.sequence, last.call()});
  }
  return calls;
}

}  // namespace fastdist::net
