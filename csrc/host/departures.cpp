// How a rank finds out that a call cannot end, says so to its peers, and explains it.

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
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

}  // namespace

// Some rank gave the communicator up: the call cannot end, whoever this rank waits for.
void HostCommunicator::check_departures(const Wait& wait) {
  check_usable();
  for (int p = 0; p < size(); ++p) {
    const Control& control = *peer(p).control;
    const auto departure = control.departure.load(std::memory_order_acquire);
    if (departure == static_cast<std::uint32_t>(Departure::kActive)) continue;
    const int blamed = static_cast<int>(control.blamed.load(std::memory_order_relaxed));
    const std::string who = describe(wait.signature) + " on rank " + std::to_string(rank_) + ": ";
    switch (static_cast<Departure>(departure)) {
      case Departure::kActive:
      case Departure::kClosed:
        break;
      case Departure::kTimeout:
        depart(Departure::kTimeout, blamed,
               Error(ErrorCode::kTimeout,
                     who + "rank " + std::to_string(p) + " gave up waiting for rank " +
                         std::to_string(blamed) + last_calls(),
                     {blamed}));
      case Departure::kPeerFailure:
        depart(Departure::kPeerFailure, blamed,
               Error(ErrorCode::kPeerFailure,
                     who + "rank " + std::to_string(blamed) + how_gone(blamed) +
                         " (noticed by rank " + std::to_string(p) + ")" + last_calls(),
                     {blamed}));
      case Departure::kInterrupted:
        depart(Departure::kPeerFailure, p,
               Error(ErrorCode::kPeerFailure,
                     who + "rank " + std::to_string(p) + " was interrupted" + last_calls(), {p}));
    }
  }
}

bool HostCommunicator::is_gone(int p) const noexcept {
  const Peer& them = peers_[static_cast<std::size_t>(p)];
  return them.control->departure.load(std::memory_order_acquire) !=
             static_cast<std::uint32_t>(Departure::kActive) ||
         !machine_->is_alive(them.machine_rank);
}

std::optional<int> HostCommunicator::find_lost() const noexcept {
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    const auto departure =
        static_cast<Departure>(peers_[p].control->departure.load(std::memory_order_acquire));
    if (departure == Departure::kClosed) continue;  // after its calls had ended
    if (departure != Departure::kActive || !machine_->is_alive(peers_[p].machine_rank)) {
      return static_cast<int>(p);
    }
  }
  return std::nullopt;
}

std::string HostCommunicator::how_gone(int p) const {
  const auto departure =
      peers_[static_cast<std::size_t>(p)].control->departure.load(std::memory_order_acquire);
  return departure == static_cast<std::uint32_t>(Departure::kClosed)
             ? " has closed the communicator"
             : " has died";
}

void HostCommunicator::give_up_on(int p, const Wait& wait) {
  depart(Departure::kPeerFailure, p,
         Error(ErrorCode::kPeerFailure,
               describe(wait.signature) + " on rank " + std::to_string(rank_) + ": rank " +
                   std::to_string(p) + how_gone(p) + last_calls(),
               {p}));
}

void HostCommunicator::check_interrupt(const Wait& wait) {
  try {
    wait.options->caller->check_interrupt();
  } catch (...) {
    leave(Departure::kInterrupted, rank_);
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
  for (const int q : missing) names += (names.empty() ? "" : ", ") + std::to_string(q);
  depart(
      Departure::kTimeout, p,
      Error(ErrorCode::kTimeout,
            describe(wait.signature) + " on rank " + std::to_string(rank_) + " timed out after " +
                seconds(waited) + " waiting for rank " + names + last_calls(),
            std::move(missing)));
}

void HostCommunicator::leave(Departure why, int blamed) noexcept {
  Control& control = *me().control;
  control.blamed.store(static_cast<std::uint32_t>(blamed), std::memory_order_relaxed);
  control.departure.store(static_cast<std::uint32_t>(why), std::memory_order_seq_cst);
  wake_everyone();
}

// This rank's own threads too. A peer's transfer with a third rank finds out on its next patrol.
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

void HostCommunicator::depart(Departure why, int blamed, const Error& error) {
  leave(why, blamed);
  throw error;
}

std::uint64_t HostCommunicator::last_sequence(int p) const noexcept {
  const Peer& them = peers_[static_cast<std::size_t>(p)];
  return std::max(them.slots[0]->sequence.load(std::memory_order_acquire),
                  them.slots[1]->sequence.load(std::memory_order_acquire));
}

// For messages: what each rank called last.
std::string HostCommunicator::last_calls() const {
  std::string text = "; last collective of each rank:";
  for (int p = 0; p < size(); ++p) {
    const std::uint64_t sequence = last_sequence(p);
    const Header& h = *peers_[static_cast<std::size_t>(p)].slots[sequence & 1];
    text += "\n  rank " + std::to_string(p) + ": ";
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
