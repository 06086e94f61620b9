// Detects that a call cannot finish, tells the peers and composes the error.

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "core/failure.h"
#include "host/communicator.h"

namespace fastdist::host {

std::optional<Failure> HostCommunicator::failure_of(int p, RankState least) const {
  if (state_of(p, std::memory_order_seq_cst) < least) return std::nullopt;
  auto failure = read(peer(p).control->failure, job_size_);
  const int rank = label(p);
  return failure ? failure : Failure{FailureKind::kMalformed, {rank}, rank};
}

// Throws the failure again if an earlier call has failed.
void HostCommunicator::check_usable() const {
  if (generation_ != process_generation()) throw error_if_forked();
  const RankState state = state_of(rank_, std::memory_order_seq_cst);
  if (state == RankState::kActive) return;
  if (state == RankState::kClosed) throw error_if_closed(label(rank_));
  throw error_after(*failure_of(rank_), label(rank_));
}

// Throws if any rank has failed: the call cannot finish, whichever rank this rank waits for.
void HostCommunicator::check_failures(const Wait& wait) {
  check_usable();
  for (int p = 0; p < size(); ++p) {
    if (const auto failure = failure_of(p)) fail(*failure, wait);
  }
}

bool HostCommunicator::has_left(int p) const noexcept {
  return state_of(p) != RankState::kActive || !machine_->is_alive(peer(p).machine_rank);
}

// Returns a rank without which the wait for rank p cannot end. Until all ranks have announced the
// call, no rank can have finished it, so it needs all of them.
std::optional<int> HostCommunicator::find_left(int p, const Wait& wait) const noexcept {
  if (has_left(p)) return p;
  for (int q = 0; wait.needs_all && q < size(); ++q) {
    if (q != rank_ && has_left(q)) return q;
  }
  return std::nullopt;
}

std::optional<int> HostCommunicator::find_lost() const noexcept {
  if (const auto dead = find_dead()) return dead;  // the others may have failed because of it
  for (int p = 0; p < size(); ++p) {
    if (p != rank_ && state_of(p) >= RankState::kFailed) return p;
  }
  return std::nullopt;
}

bool HostCommunicator::has_closed(int p) const noexcept {
  return state_of(p, std::memory_order_seq_cst) == RankState::kClosed;
}

std::optional<int> HostCommunicator::find_dead() const noexcept {
  for (int p = 0; p < size(); ++p) {
    if (p == rank_ || machine_->is_alive(peer(p).machine_rank)) continue;
    if (state_of(p) == RankState::kActive) return p;
  }
  return std::nullopt;
}

// Throws the failure that a rank has announced, perhaps since the last check, rather than its
// absence.
void HostCommunicator::throw_peer_failure(int p, const Wait& wait) {
  check_failures(wait);
  const auto kind = has_closed(p) ? FailureKind::kClosed : FailureKind::kDied;
  fail({kind, {label(p)}, label(rank_)}, wait);
}

void HostCommunicator::check_interrupt(const Wait& wait) {
  const int self = label(rank_);
  try {
    wait.options->caller->check_interrupt();
  } catch (const Error& error) {
    announce({FailureKind::kError, error.ranks(), self, {}, error.what(), error.code()},
             RankState::kFailed);
    throw;
  } catch (...) {
    announce({FailureKind::kInterrupted, {self}, self}, RankState::kFailed);
    throw;
  }
}

void HostCommunicator::check_timeout(const Wait& wait, int p) {
  const auto waited = std::chrono::steady_clock::now() - wait.start;
  if (waited < wait.options->timeout) return;
  std::vector<int> missing;
  const bool collective = wait.bell == &me().control->bell;
  for (int q = 0; collective && q < size(); ++q) {
    if (last_sequence(q) < sequence_) missing.push_back(label(q));
  }
  if (missing.empty()) missing.push_back(label(p));
  fail({FailureKind::kTimeout, std::move(missing), label(rank_), waited}, wait);
}

void HostCommunicator::announce(const Failure& failure, RankState state) noexcept {
  if (tell(failure, state)) mark_failing_waits(failure);
}

// Returns false if this rank has told a failure before, which stays.
bool HostCommunicator::tell(const Failure& failure, RankState state) noexcept {
  Control& control = *me().control;
  {
    const std::lock_guard lock(announce_mutex_);
    if (control.state.load(std::memory_order_relaxed) != RankState::kActive) return false;
    write(failure, control.failure);
    control.state.store(state, std::memory_order_seq_cst);
  }
  wake_everyone();
  return true;
}

std::optional<Failure> HostCommunicator::find_told() const {
  for (int p = 0; p < size(); ++p) {
    if (auto failure = failure_of(p, RankState::kTold)) return failure;
  }
  return std::nullopt;
}

// Includes this rank's own threads. A peer's transfer with a third rank notices at its next poll.
void HostCommunicator::wake_everyone() noexcept {
  for (Peer& p : peers_) {
    p.control->bell.ring();
    p.lanes[rank_].to.bell.ring();
    p.lanes[rank_].from.bell.ring();
  }
  for (int p = 0; p < size(); ++p) {
    me().lanes[p].to.bell.ring();
    me().lanes[p].from.bell.ring();
  }
}

void HostCommunicator::fail(const Failure& failure, const Wait& wait) {
  announce(failure, RankState::kFailed);
  throw error_in(failure, wait.shown(), label(rank_), last_calls());
}

std::uint64_t HostCommunicator::last_sequence(int p) const noexcept {
  const Peer& them = peer(p);
  return std::max(them.slots[0]->sequence.load(std::memory_order_acquire),
                  them.slots[1]->sequence.load(std::memory_order_acquire));
}

std::vector<LastCall> HostCommunicator::last_calls() const {
  std::vector<LastCall> calls;
  for (int p = 0; p < size(); ++p) {
    const std::uint64_t sequence = last_sequence(p);
    const Header& h = *peer(p).slots[sequence & 1];
    calls.push_back({label(p), sequence, signature_in(h)});
  }
  return calls;
}

}  // namespace fastdist::host
