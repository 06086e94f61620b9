// Detects ranks that wait for each other forever, such as one in `barrier` and one in `send`.
//
// A rank that makes no other call until its wait ends publishes the wait: which rank must act, and
// which counter of that rank must reach which value. A chain of such waits that leads back to one
// of its ranks is a deadlock, since counters are written by calls of their owners alone. All waits
// of the chain are read twice, and a wait's number is never used again, so all of them last from
// the first reading to the second, and the counters are read in between. What a reading takes into
// account is released after the end of the wait before, and acquired before the second reading: on
// processors that reorder stores and loads, the wait of a number could otherwise be part of
// another.
//
// A process with a single thread makes no call in any of its communicators meanwhile, and publishes
// the wait in all of them: it may wait in one for a rank that waits for it in another.

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/failure.h"
#include "core/process.h"
#include "host/communicator.h"

namespace fastdist::host {

void HostCommunicator::check_deadlock(int p, const Counter& counter, std::uint64_t value,
                                      Wait& wait) {
  // Another thread of the process may be about to make the call that ends all waits. Ranks that are
  // threads of one process make their calls in these threads.
  const bool is_only_call =
      machine_->one_process() ? labels_.empty() : wait.options->caller->is_alone();
  if (!is_only_call || submitted_.load(std::memory_order_acquire) != 0) return end_wait(wait);
  if (wait.number == 0) {
    static std::atomic<std::uint64_t> waits{0};
    wait.number = waits.fetch_add(1) + 1;
    publish_wait(p, counter, value, wait, Reach::kHere, wait.options->caller->location());
    check_failures(wait);  // of ranks that failed before they could see it
  }
  show_elsewhere(p, counter, value, wait);
  if (wait.number == 0) return;
  if (wait.is_shown) {
    if (auto failure = find_deadlock_of(wait)) {
      failure->ranks = {label(p), label(rank_)};
      failure->noticed_by = label(rank_);
      fail(*failure, wait);
    }
  }
  std::vector<int> ranks = find_deadlock();
  if (ranks.empty()) return;
  for (int& r : ranks) r = label(r);
  fail({FailureKind::kDeadlock, std::move(ranks), label(rank_), {}, waits()}, wait);
}

void HostCommunicator::publish_wait(int p, const Counter& counter, std::uint64_t value,
                                    const Wait& wait, Reach reach,
                                    const std::string& site) noexcept {
  const std::lock_guard lock(publish_mutex_);
  Control& control = *me().control;
  control.blocked_site.write(site);
  BlockedWait& published = control.blocked;
  const Signature& call = wait.shown();
  published.signature.store(call.packed(), std::memory_order_relaxed);
  published.count.store(call.count, std::memory_order_relaxed);
  published.list.store(call.list, std::memory_order_relaxed);
  published.reach.store(reach, std::memory_order_relaxed);
  published.rank.store(static_cast<std::uint64_t>(p), std::memory_order_release);
  published.offset.store(static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(&counter) -
                                                    machine_->window(peer(p).machine_rank)),
                         std::memory_order_release);
  published.value.store(value, std::memory_order_release);
  published.number.store(wait.number, std::memory_order_seq_cst);
}

void HostCommunicator::withdraw(const Wait& wait) noexcept {
  Counter& number = me().control->blocked.number;
  if (number.load(std::memory_order_relaxed) == wait.number) {
    number.store(0, std::memory_order_seq_cst);
  }
}

void HostCommunicator::end_wait(Wait& wait) noexcept {
  if (wait.number == 0) return;
  hide_elsewhere(wait);
  withdraw(wait);
  wait.number = 0;
}

// Publishes the wait in this process's other communicators too, so that chains of waits lead
// through them. A communicator that has failed tells nothing new: see `find_deadlock_of`. A wait
// that is no longer shown gets a new number, because ranks may have marked the old one as failing.
void HostCommunicator::show_elsewhere(int p, const Counter& counter, std::uint64_t value,
                                      Wait& wait) {
  if (machine_->one_process() || !wait.options->caller->is_alone()) {
    if (wait.is_shown) end_wait(wait);
    return;
  }
  const std::string site = me().control->blocked_site.text.data();
  wait.is_shown = true;
  me().control->blocked.reach.store(Reach::kEverywhere, std::memory_order_relaxed);
  Registry<HostCommunicator>::for_each([&](HostCommunicator& other) {
    if (&other == this || other.machine_ != machine_) return;
    const auto awaited = std::ranges::find(other.members_, members_[static_cast<std::size_t>(p)]);
    if (awaited == other.members_.end()) return;
    if (other.me().control->blocked.number.load(std::memory_order_relaxed) == wait.number) return;
    for (int q = 0; q < other.size(); ++q) {
      if (other.has_left(q)) return;
    }
    other.publish_wait(static_cast<int>(awaited - other.members_.begin()), counter, value, wait,
                       Reach::kElsewhere, site);
  });
}

void HostCommunicator::hide_elsewhere(Wait& wait) noexcept {
  if (!std::exchange(wait.is_shown, false)) return;
  me().control->blocked.reach.store(Reach::kHere, std::memory_order_relaxed);
  Registry<HostCommunicator>::for_each([&](HostCommunicator& other) {
    if (&other != this) other.withdraw(wait);
  });
}

// Returns the deadlock that a rank of another communicator has found this wait to be part of. Such
// a wait does not end before the rank announces the deadlock, and the wait was shown only if no
// rank had failed. So what is announced since then concerns this wait, and no earlier one.
std::optional<Failure> HostCommunicator::find_deadlock_of(const Wait& wait) {
  std::optional<Failure> found;
  Registry<HostCommunicator>::for_each([&](HostCommunicator& other) {
    if (&other == this || found) return;
    if (other.me().control->blocked.number.load(std::memory_order_relaxed) != wait.number) return;
    for (int q = 0; q < other.size() && !found; ++q) {
      auto failure = other.failure_of(q);
      if (!failure || failure->kind != FailureKind::kDeadlock) continue;
      if (std::ranges::find(failure->ranks, other.label(other.rank_)) == failure->ranks.end())
        continue;
      other.tell(*failure, RankState::kFailed);
      failure->kind = FailureKind::kDeadlockElsewhere;
      found = std::move(failure);
    }
  });
  return found;
}

// Marks the waits that end with a failure announced here. Their ranks may not have seen it yet,
// while this one already waits for them elsewhere.
void HostCommunicator::mark_failing_waits(const Failure& failure) noexcept {
  const auto is_deadlocked = [&](int p) {
    return failure.kind == FailureKind::kDeadlock &&
           std::ranges::count(failure.ranks, label(p)) != 0;
  };
  for (int p = 0; p < size(); ++p) {
    const BlockedWait& wait = peer(p).control->blocked;
    const bool is_elsewhere = wait.reach.load(std::memory_order_relaxed) == Reach::kElsewhere;
    if (!is_elsewhere || is_deadlocked(p)) mark_failing_wait(p);
  }
}

// Marks the waits that end because this rank has closed the communicator; others may go on.
void HostCommunicator::mark_waits_for_this_rank() noexcept {
  for (int p = 0; p < size(); ++p) {
    const BlockedWait& wait = peer(p).control->blocked;
    const bool is_here = wait.reach.load(std::memory_order_relaxed) != Reach::kElsewhere;
    const auto awaited = static_cast<int>(wait.rank.load(std::memory_order_relaxed));
    if (is_here && awaited == rank_) mark_failing_wait(p);
  }
}

// Marks the wait of rank p in all communicators in which it may be shown.
void HostCommunicator::mark_failing_wait(int p) noexcept {
  const Control& control = *peer(p).control;
  const std::uint64_t number = control.blocked.number.load(std::memory_order_seq_cst);
  if (number == 0 || machine_->one_process()) return;
  Registry<HostCommunicator>::for_each([&](HostCommunicator& other) {
    if (other.machine_ != machine_) return;
    const auto it = std::ranges::find(other.members_, members_[static_cast<std::size_t>(p)]);
    if (it == other.members_.end()) return;
    const auto q = static_cast<std::size_t>(it - other.members_.begin());
    Counter& failing = other.peers_[q].control->failing;
    std::uint64_t known = failing.load(std::memory_order_relaxed);
    while (known < number && !failing.compare_exchange_weak(known, number)) {
    }
  });
}

std::optional<HostCommunicator::Blocked> HostCommunicator::blocked(int p) const noexcept {
  const Control& control = *peer(p).control;
  const BlockedWait& wait = control.blocked;
  const std::uint64_t number = wait.number.load(std::memory_order_seq_cst);
  const std::uint64_t rank = wait.rank.load(std::memory_order_acquire);
  const std::uint64_t offset = wait.offset.load(std::memory_order_acquire);
  const std::uint64_t value = wait.value.load(std::memory_order_acquire);
  // The counter of another wait may lie beyond the end of this rank's segment.
  if (number == 0 || wait.number.load(std::memory_order_seq_cst) != number) return std::nullopt;
  if (control.failing.load(std::memory_order_acquire) == number) return std::nullopt;
  if (rank >= peers_.size()) return std::nullopt;
  const auto* counter =
      reinterpret_cast<const Counter*>(machine_->window(peers_[rank].machine_rank) + offset);
  if (counter->load(std::memory_order_seq_cst) >= value) return std::nullopt;
  return Blocked{number, static_cast<int>(rank), wait.reach.load(std::memory_order_relaxed)};
}

// Returns the ranks of the chain of waits that begins with this rank's, if it is a deadlock.
std::vector<int> HostCommunicator::find_deadlock() const {
  std::vector<Blocked> waits(peers_.size());
  std::vector<int> chain;
  int rank = rank_;
  bool is_elsewhere = false;  // where the rank before waits for this one
  while (std::find(chain.begin(), chain.end(), rank) == chain.end()) {
    const std::optional<Blocked> wait = blocked(rank);
    if (!wait || (is_elsewhere && wait->reach == Reach::kHere)) return {};
    waits[static_cast<std::size_t>(rank)] = *wait;
    chain.push_back(rank);
    rank = wait->rank;
    is_elsewhere = wait->reach == Reach::kElsewhere;
  }
  if (is_elsewhere && waits[static_cast<std::size_t>(rank)].reach == Reach::kHere) return {};
  const bool lasts = std::all_of(chain.begin(), chain.end(), [&](int p) {
    const std::optional<Blocked> wait = blocked(p);
    return wait && wait->number == waits[static_cast<std::size_t>(p)].number;
  });
  return lasts ? chain : std::vector<int>{};
}

std::string HostCommunicator::waits() const {
  std::vector<WaitOfRank> waits;
  for (int p = 0; p < size(); ++p) {
    const Control& control = *peer(p).control;
    const BlockedWait& wait = control.blocked;
    waits.push_back({.rank = label(p)});
    if (wait.number.load(std::memory_order_acquire) == 0) continue;
    waits.back() = {label(p), signature_in(wait),
                    label(static_cast<int>(wait.rank.load(std::memory_order_relaxed))),
                    control.blocked_site.text.data(),
                    wait.reach.load(std::memory_order_relaxed) == Reach::kElsewhere};
  }
  return describe_waits(waits, label(rank_), job_size_);
}

}  // namespace fastdist::host
