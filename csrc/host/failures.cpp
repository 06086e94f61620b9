// Detects that a call cannot finish, tells the peers and composes the error.

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "host/communicator.h"

namespace fastdist::host {
namespace {

std::string seconds(std::chrono::nanoseconds duration) {
  std::string text = std::to_string(std::chrono::duration<double>(duration).count());
  text.resize(text.find('.') + 2);
  return text + " s";
}

Error cause_of(const FailureCause& cause) {
  return {static_cast<ErrorCode>(cause.code),
          cause.text.data(),
          {cause.failed.begin(), cause.failed.begin() + cause.ranks}};
}

}  // namespace

// Throws the cause again if an earlier call has failed.
void HostCommunicator::check_usable() const {
  if (generation_ != process_generation()) {
    throw Error(ErrorCode::kState,
                "the communicator belongs to the parent process; a forked child cannot use it");
  }
  const Control& control = *peers_[static_cast<std::size_t>(rank_)].control;
  const auto state = static_cast<RankState>(control.state.load(std::memory_order_seq_cst));
  if (state == RankState::kActive) return;
  const int failed_rank = static_cast<int>(control.failed_rank.load(std::memory_order_relaxed));
  const std::string unusable = "the communicator cannot be used any more on rank " + name(rank_) +
                               ", make a new one: in an earlier call, ";
  switch (state) {
    case RankState::kActive:
    case RankState::kClosed:
      break;
    case RankState::kTimeout:
      throw Error(ErrorCode::kTimeout,
                  unusable + "rank " + name(failed_rank) + " did not come in time",
                  {label(failed_rank)});
    case RankState::kPeerFailure:
      throw Error(ErrorCode::kPeerFailure,
                  unusable + "rank " + name(failed_rank) + describe_exit(failed_rank),
                  {label(failed_rank)});
    case RankState::kInterrupted:
      throw Error(ErrorCode::kState, unusable + "this rank was interrupted");
    case RankState::kDeadlock:
      throw Error(
          ErrorCode::kMismatch,
          unusable + "it waited for rank " + name(failed_rank) + ", which waited for other ranks",
          {label(failed_rank)});
    case RankState::kCause: {
      const Error cause = cause_of(control.cause);
      throw Error(cause.code(), unusable + cause.what(), cause.ranks());
    }
  }
  throw Error(ErrorCode::kState, "the communicator is closed on rank " + name(rank_));
}

// Throws if any rank has failed: the call cannot finish, whichever rank this rank waits for.
void HostCommunicator::check_failures(const Wait& wait) {
  check_usable();
  for (int p = 0; p < size(); ++p) {
    const Control& control = *peer(p).control;
    const auto state = control.state.load(std::memory_order_acquire);
    if (state == static_cast<std::uint32_t>(RankState::kActive)) continue;
    const int failed_rank = static_cast<int>(control.failed_rank.load(std::memory_order_relaxed));
    const std::string who = describe(wait.shown()) + " on rank " + name(rank_) + ": ";
    switch (static_cast<RankState>(state)) {
      case RankState::kActive:
      case RankState::kClosed:
        break;
      case RankState::kTimeout:
        fail(RankState::kTimeout, failed_rank,
             Error(ErrorCode::kTimeout,
                   who + "rank " + name(p) + " gave up waiting for rank " + name(failed_rank) +
                       last_calls(),
                   {label(failed_rank)}));
      case RankState::kPeerFailure:
        fail(RankState::kPeerFailure, failed_rank,
             Error(ErrorCode::kPeerFailure,
                   who + "rank " + name(failed_rank) + describe_exit(failed_rank) +
                       " (noticed by rank " + name(p) + ")" + last_calls(),
                   {label(failed_rank)}));
      case RankState::kInterrupted:
        fail(RankState::kPeerFailure, p,
             Error(ErrorCode::kPeerFailure,
                   who + "rank " + name(p) + " was interrupted" + last_calls(), {label(p)}));
      case RankState::kDeadlock:
        fail(RankState::kDeadlock, p, Error(ErrorCode::kMismatch, describe_deadlock(), {label(p)}));
      case RankState::kCause: {
        const Error cause = cause_of(control.cause);
        abandon(cause);
        throw Error(cause.code(), who + cause.what(), cause.ranks());
      }
    }
  }
}

bool HostCommunicator::has_left(int p) const noexcept {
  const Peer& them = peers_[static_cast<std::size_t>(p)];
  return them.control->state.load(std::memory_order_acquire) !=
             static_cast<std::uint32_t>(RankState::kActive) ||
         !machine_->is_alive(them.machine_rank);
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
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    const auto state =
        static_cast<RankState>(peers_[p].control->state.load(std::memory_order_acquire));
    if (state == RankState::kClosed) continue;  // a rank closes after its calls have ended
    if (state != RankState::kActive || !machine_->is_alive(peers_[p].machine_rank)) {
      return static_cast<int>(p);
    }
  }
  return std::nullopt;
}

std::optional<int> HostCommunicator::find_dead() const noexcept {
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    if (static_cast<int>(p) == rank_ || machine_->is_alive(peers_[p].machine_rank)) continue;
    const auto state = peers_[p].control->state.load(std::memory_order_acquire);
    if (state == static_cast<std::uint32_t>(RankState::kActive)) return static_cast<int>(p);
  }
  return std::nullopt;
}

std::string HostCommunicator::describe_exit(int p) const {
  const auto state =
      peers_[static_cast<std::size_t>(p)].control->state.load(std::memory_order_acquire);
  return state == static_cast<std::uint32_t>(RankState::kClosed) ? " has closed the communicator"
                                                                 : " has died";
}

// Throws the cause that a rank has announced, perhaps since the last check, rather than its
// absence.
void HostCommunicator::throw_peer_failure(int p, const Wait& wait) {
  check_failures(wait);
  fail(RankState::kPeerFailure, p,
       Error(ErrorCode::kPeerFailure,
             describe(wait.shown()) + " on rank " + name(rank_) + ": rank " + name(p) +
                 describe_exit(p) + last_calls(),
             {label(p)}));
}

void HostCommunicator::check_interrupt(const Wait& wait) {
  try {
    wait.options->caller->check_interrupt();
  } catch (const Error& cause) {
    abandon(cause);
    throw;
  } catch (...) {
    announce_failure(RankState::kInterrupted, rank_);
    throw;
  }
}

void HostCommunicator::check_timeout(const Wait& wait, int p) {
  const auto waited = std::chrono::steady_clock::now() - wait.start;
  if (waited < wait.options->timeout) return;
  std::vector<int> missing;
  const bool collective = wait.bell == &me().control->bell;
  for (int q = 0; collective && q < size(); ++q) {
    if (last_sequence(q) < sequence_) missing.push_back(q);
  }
  if (missing.empty()) missing.push_back(p);
  std::string names;
  for (int& q : missing) {
    names += (names.empty() ? "" : ", ") + name(q);
    q = label(q);
  }
  fail(RankState::kTimeout, p,
       Error(ErrorCode::kTimeout,
             describe(wait.shown()) + " on rank " + name(rank_) + " reached its timeout after " +
                 seconds(waited) + " waiting for rank " + names + last_calls(),
             std::move(missing)));
}

void HostCommunicator::abandon(const Error& cause) noexcept {
  Control& control = *me().control;
  const std::lock_guard lock(abandon_mutex_);
  if (control.state.load(std::memory_order_relaxed) !=
      static_cast<std::uint32_t>(RankState::kActive)) {
    return;
  }
  FailureCause& shared = control.cause;
  const std::string_view text = cause.what();
  const std::size_t length = std::min(text.size(), shared.text.size() - 1);
  shared.code = static_cast<std::uint32_t>(cause.code());
  shared.ranks = static_cast<std::uint32_t>(std::min(cause.ranks().size(), shared.failed.size()));
  std::copy_n(cause.ranks().begin(), shared.ranks, shared.failed.begin());
  std::copy_n(text.data(), length, shared.text.data());
  shared.text[length] = '\0';
  announce_failure(RankState::kCause, rank_);
}

std::optional<Error> HostCommunicator::find_cause() const {
  for (const Peer& p : peers_) {
    if (p.control->state.load(std::memory_order_acquire) ==
        static_cast<std::uint32_t>(RankState::kCause)) {
      return cause_of(p.control->cause);
    }
  }
  return std::nullopt;
}

void HostCommunicator::announce_failure(RankState why, int failed_rank) noexcept {
  Control& control = *me().control;
  control.failed_rank.store(static_cast<std::uint32_t>(failed_rank), std::memory_order_relaxed);
  control.state.store(static_cast<std::uint32_t>(why), std::memory_order_seq_cst);
  wake_everyone();
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

void HostCommunicator::fail(RankState why, int failed_rank, const Error& error) {
  announce_failure(why, failed_rank);
  throw error;
}

std::uint64_t HostCommunicator::last_sequence(int p) const noexcept {
  const Peer& them = peers_[static_cast<std::size_t>(p)];
  return std::max(them.slots[0]->sequence.load(std::memory_order_acquire),
                  them.slots[1]->sequence.load(std::memory_order_acquire));
}

// Describes each rank's last collective, for messages.
std::string HostCommunicator::last_calls() const {
  std::string text = "; last collective of each rank:";
  for (int p = 0; p < size(); ++p) {
    const std::uint64_t sequence = last_sequence(p);
    const Header& h = *peers_[static_cast<std::size_t>(p)].slots[sequence & 1];
    text += "\n  rank " + name(p) + ": ";
    text += sequence == 0
                ? "none"
                : "call " + std::to_string(sequence) + ", " +
                      describe(unpack_signature(h.signature.load(std::memory_order_relaxed),
                                                h.count.load(std::memory_order_relaxed),
                                                h.list.load(std::memory_order_relaxed)));
  }
  return text;
}

}  // namespace fastdist::host
