// Detects ranks that wait for each other for ever, such as one in `barrier` and one in `send`.
//
// A rank that makes no other call until its wait ends publishes the wait: which rank must act, and
// which counter of that rank must reach which value. A chain of such waits that leads back to one
// of its ranks is a deadlock, since counters are written by calls of their owners alone. All waits
// of the chain are read twice, and a wait's number is never used again, so all of them last from
// the first reading to the second, and the counters are read in between. What a reading takes into
// account is released after the end of the wait before, and acquired before the second reading: on
// processors that reorder stores and loads, the wait of a number could otherwise be part of
// another.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/failure.h"
#include "host/communicator.h"

namespace fastdist::host {

void HostCommunicator::check_deadlock(int p, const Counter& counter, std::uint64_t value,
                                      Wait& wait) {
  if (submitted_.load(std::memory_order_acquire) != 0) return end_wait(wait);
  if (!wait.is_published) publish_wait(p, counter, value, wait);
  std::vector<int> ranks = find_deadlock();
  if (ranks.empty()) return;
  fail({.kind = FailureKind::kDeadlock,
        .ranks = std::move(ranks),
        .noticed_by = rank_,
        .detail = waits()},
       wait);
}

void HostCommunicator::publish_wait(int p, const Counter& counter, std::uint64_t value,
                                    Wait& wait) {
  Control& control = *me().control;
  control.site.write(wait.options->caller->location());
  BlockedWait& published = control.blocked;
  published.signature.store(wait.signature.packed(), std::memory_order_relaxed);
  published.count.store(wait.signature.count, std::memory_order_relaxed);
  published.list.store(wait.signature.list, std::memory_order_relaxed);
  published.rank.store(static_cast<std::uint64_t>(p), std::memory_order_release);
  published.offset.store(
      static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(&counter) - peer(p).block),
      std::memory_order_release);
  published.value.store(value, std::memory_order_release);
  published.number.store(++waits_, std::memory_order_seq_cst);
  wait.is_published = true;
}

void HostCommunicator::end_wait(Wait& wait) noexcept {
  if (!wait.is_published) return;
  wait.is_published = false;
  me().control->blocked.number.store(0, std::memory_order_seq_cst);
}

std::optional<HostCommunicator::Blocked> HostCommunicator::blocked(int p) const noexcept {
  const BlockedWait& wait = peers_[static_cast<std::size_t>(p)].control->blocked;
  const std::uint64_t number = wait.number.load(std::memory_order_seq_cst);
  const std::uint64_t rank = wait.rank.load(std::memory_order_acquire);
  if (number == 0 || rank >= peers_.size()) return std::nullopt;
  const auto* counter = reinterpret_cast<const Counter*>(
      peers_[rank].block + wait.offset.load(std::memory_order_acquire));
  if (counter->load(std::memory_order_seq_cst) >= wait.value.load(std::memory_order_acquire)) {
    return std::nullopt;
  }
  return Blocked{number, static_cast<int>(rank)};
}

// Returns the ranks of the chain of waits that begins with this rank's, if it is a deadlock.
std::vector<int> HostCommunicator::find_deadlock() const {
  std::vector<Blocked> waits(peers_.size());
  std::vector<int> chain;
  int rank = rank_;
  while (std::find(chain.begin(), chain.end(), rank) == chain.end()) {
    const std::optional<Blocked> wait = blocked(rank);
    if (!wait) return {};
    waits[static_cast<std::size_t>(rank)] = *wait;
    chain.push_back(rank);
    rank = wait->rank;
  }
  const bool lasts = std::all_of(chain.begin(), chain.end(), [&](int p) {
    const std::optional<Blocked> wait = blocked(p);
    return wait && wait->number == waits[static_cast<std::size_t>(p)].number;
  });
  return lasts ? chain : std::vector<int>{};
}

std::string HostCommunicator::waits() const {
  std::vector<std::optional<WaitOfRank>> waits(peers_.size());
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    const Control& control = *peers_[p].control;
    const BlockedWait& wait = control.blocked;
    if (wait.number.load(std::memory_order_acquire) == 0) continue;
    waits[p] = {signature_in(wait), static_cast<int>(wait.rank.load(std::memory_order_relaxed)),
                control.site.text.data()};
  }
  return describe_waits(waits, rank_);
}

}  // namespace fastdist::host
