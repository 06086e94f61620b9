#include "host/communicator.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/failure.h"
#include "core/process.h"

namespace fastdist::host {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpinsPerClock = 32;
// How long a failed call waits for ranks that use its arrays in place. Only ranks that are stopped,
// or get no processor, take longer.
constexpr std::chrono::seconds kLongestAccess{1};

Layout layout_of(int ranks, const Tuning& tuning) {
  return {ranks, tuning.slot_bytes, tuning.chunk_bytes, tuning.ring_chunks * tuning.chunk_bytes,
          tuning.lane_chunks * tuning.lane_bytes};
}

}  // namespace

std::size_t HostCommunicator::block_bytes(int ranks, const Tuning& tuning) {
  const std::size_t lines = static_cast<std::size_t>(ranks) * kCacheLine;
  if (tuning.ring_chunks < 2 || tuning.lane_chunks < 2 || tuning.chunk_bytes < lines ||
      tuning.chunk_bytes % kCacheLine != 0 || tuning.lane_bytes == 0) {
    refuse(ErrorCode::kValue,
           "ring_chunks and lane_chunks must be at least 2, chunk_bytes a multiple of 64 and "
           "at least ",
           lines, " for ", ranks, " ranks, lane_bytes at least 1; got ", tuning.chunk_bytes,
           " and ", tuning.lane_bytes);
  }
  return layout_of(ranks, tuning).bytes();
}

HostCommunicator::HostCommunicator(std::shared_ptr<Machine> machine, std::vector<int> members,
                                   int rank, const std::vector<std::size_t>& offsets,
                                   std::shared_ptr<SharedBlock> block, const Tuning& tuning)
    : machine_(std::move(machine)),
      members_(std::move(members)),
      rank_(rank),
      block_(std::move(block)),
      tuning_(tuning),
      layout_(layout_of(static_cast<int>(members_.size()), tuning)),
      sources_(members_.size()),
      targets_(members_.size()),
      outgoing_(members_.size()),
      incoming_(members_.size()),
      source_offsets_(members_.size()),
      sent_(members_.size()),
      received_(members_.size()) {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Peer p{};
    p.machine_rank = members_[i];
    p.block = machine_->window(members_[i]) + offsets[i];
    p.control = reinterpret_cast<Control*>(p.block);
    p.lanes = reinterpret_cast<Lane*>(p.block + sizeof(Control));
    for (int parity : {0, 1}) {
      p.slots[parity] = reinterpret_cast<Header*>(p.block + layout_.slot(parity));
    }
    peers_.push_back(p);
  }
  Control& own = *me().control;
  own.window.store(machine_->window_bytes(), std::memory_order_relaxed);
  if (::sched_getaffinity(0, sizeof(cpu_set_t), &own.cores) == 0) {
    own.has_cores.store(true, std::memory_order_release);
  }
  Registry<HostCommunicator>::add(*this);
}

HostCommunicator::~HostCommunicator() {
  if (generation_ != process_generation()) return;
  Registry<HostCommunicator>::remove(*this);
  close();
  // No call of this rank uses the peers' blocks any more. Peers may still read this rank's block:
  // it is free when every rank has marked it closed.
  for (Peer& p : peers_) p.control->closed.fetch_add(1, std::memory_order_acq_rel);
  machine_->retire(block_, [control = me().control, n = size()] {
    return control->closed.load(std::memory_order_acquire) == static_cast<std::uint32_t>(n);
  });
}

void HostCommunicator::close() noexcept {
  if (generation_ != process_generation() || is_closed_.exchange(true)) return;
  auto active = RankState::kActive;
  me().control->state.compare_exchange_strong(active, RankState::kClosed);
  wake_everyone();
  mark_waits_for_this_rank();
}

std::shared_ptr<std::byte> HostCommunicator::allocate(std::size_t bytes) {
  check_usable();
  const auto block = std::make_shared<SharedBlock>(machine_, me().machine_rank, bytes);
  return {block, block->data()};
}

// True if there are more ranks than cores. Ranks may be bound to cores, so the number of cores is
// that of all ranks together; it is unknown until every rank has published its own.
bool HostCommunicator::is_crowded() noexcept {
  int total = cores_.load(std::memory_order_relaxed);
  if (total != 0) return size() > total;
  cpu_set_t all{};
  for (const Peer& p : peers_) {
    if (!p.control->has_cores.load(std::memory_order_acquire)) return false;
    CPU_OR(&all, &all, &p.control->cores);
  }
  total = CPU_COUNT(&all);
  cores_.store(total, std::memory_order_relaxed);
  return size() > total;
}

Header& HostCommunicator::announce(const Signature& signature, const CallOptions& options) {
  check_usable();
  if (machine_->one_process()) options.caller->may_block();
  ++sequence_;
  const Signature& announced = options.whole != nullptr ? *options.whole : signature;
  wait_.begin(options, announced, me().control->bell);
  if (options.record != nullptr) options.record->announce(wait_.shown());
  Header& header = header_of(rank_);
  header.signature.store(announced.packed(), std::memory_order_relaxed);
  header.count.store(announced.count, std::memory_order_relaxed);
  header.list.store(announced.list, std::memory_order_relaxed);
  header.input.store(0, std::memory_order_relaxed);
  header.output.store(0, std::memory_order_relaxed);
  return header;
}

void HostCommunicator::exchange(Header& header) {
  publish(header.sequence, sequence_);
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) await(p, header_of(p).sequence, sequence_);
  }
  wait_.needs_all = false;
  if (wait_.is_late && wait_.options->record != nullptr) wait_.options->record->arrive();
  const Signature& signature = wait_.signature;
  const std::uint64_t packed = signature.packed();
  std::uint64_t list = signature.list;
  for (int p = 0; p < size(); ++p) {
    const Header& theirs = header_of(p);
    if (theirs.signature.load(std::memory_order_relaxed) != packed ||
        theirs.count.load(std::memory_order_relaxed) != signature.count ||
        !matches(list, theirs.list.load(std::memory_order_relaxed))) {
      throw_mismatch();
    }
  }
}

void HostCommunicator::end_access() noexcept {
  // An exchange rather than a store, since it drains stores that bypassed the caches.
  me().control->accessing.exchange(0, std::memory_order_seq_cst);
}

void HostCommunicator::check_active(int p) {
  if (state_of(p, std::memory_order_seq_cst) == RankState::kActive) return;
  end_access();
  throw_peer_failure(p, wait_);
}

void HostCommunicator::await_accesses() {
  for (int p = 0; p < size(); ++p) await_access_end(p, peer(p).control->accessing, sequence_);
}

// Memory that a rank still uses after the longest wait is not allocated again until it ends.
void HostCommunicator::await_access_end(int p, const Counter& accessing, std::uint64_t call) {
  if (p == rank_) return;
  const auto has_ended = [&accessing, call, machine = machine_.get(), rank = peer(p).machine_rank] {
    return accessing.load(std::memory_order_seq_cst) != call || !machine->is_alive(rank);
  };
  const auto start = Clock::now();
  while (!has_ended()) {
    if (!machine_->one_process() && Clock::now() - start > kLongestAccess) {
      return machine_->keep_blocks_until(has_ended);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Called by every rank when signatures differ. Each rank publishes where it made the call, waits
// until all others have done so, and throws. No data has moved, so the next call can proceed.
void HostCommunicator::throw_mismatch() {
  CallSite& site = me().control->site;
  site.write(wait_.options->caller->location());
  publish(site.call, sequence_);

  std::vector<CallOfRank> calls;
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) await(p, peer(p).control->site.call, sequence_);
    calls.push_back({signature_in(header_of(p)), peer(p).control->site.text.data()});
  }
  throw mismatch_of(sequence_, rank_, calls);
}

// An exchange rather than a store: it is ordered before the loads of the bells, and it drains
// stores that bypassed the caches.
void HostCommunicator::publish(Counter& counter, std::uint64_t value) noexcept {
  counter.exchange(value, std::memory_order_seq_cst);
  for (Peer& p : peers_) p.control->bell.ring_if_waiting(rank_);
}

void HostCommunicator::await(int p, const Counter& counter, std::uint64_t value) {
  if (counter.load(std::memory_order_acquire) >= value) return;
  await_slowly(p, counter, value, wait_);
}

void HostCommunicator::await_slowly(int p, const Counter& counter, std::uint64_t value,
                                    Wait& wait) {
  const auto ready = [&] { return counter.load(std::memory_order_seq_cst) >= value; };
  for (int i = 0; i < kSpinsPerClock; ++i) {
    if (ready()) return;
    cpu_relax();
  }
  wait.is_late = true;
  wait.options->caller->may_block();
  // The peer may need this core: after `hold`, yield it.
  const std::chrono::nanoseconds spin = is_crowded() ? tuning_.spin_crowded : tuning_.spin;
  const auto start = Clock::now();
  for (auto now = start; now - start < spin; now = Clock::now()) {
    if (now - start > tuning_.hold) std::this_thread::yield();
    for (int i = 0; i < kSpinsPerClock; ++i) {
      if (ready()) return;
      cpu_relax();
    }
  }
  wait.start = start;
  struct Hiding {
    HostCommunicator& communicator;
    Wait& wait;
    ~Hiding() { communicator.hide_elsewhere(wait); }
  } const hiding{*this, wait};
  auto last_poll = start;
  while (!ready()) {
    wait.bell->sleep(static_cast<std::uint32_t>(p) + 1, kPollInterval, ready);
    if (ready()) break;
    check_failures(wait);
    const auto now = Clock::now();
    if (now - last_poll < kPollInterval) continue;
    last_poll = now;
    check_interrupt(wait);
    const std::optional<int> lost = find_left(p, wait);
    if (ready()) break;  // values published before the peer left are still valid
    if (lost) throw_peer_failure(*lost, wait);
    check_deadlock(p, counter, value, wait);
    check_timeout(wait, p);
  }
  end_wait(wait);
}

std::uint64_t HostCommunicator::locate(TensorViews arrays) const noexcept {
  if (machine_->one_process()) return reinterpret_cast<std::uint64_t>(arrays.data());
  if (arrays.size() != 1) return 0;
  const int own = peer(rank_).machine_rank;
  const std::uint64_t location = machine_->locate(own, arrays[0].data);
  return location != 0 && location + arrays[0].bytes() <= mapped_bytes() ? location : 0;
}

// The bytes of a window that every rank has mapped, which may be less than this rank's if another
// rank's address space is limited. 0 until all ranks have published theirs.
std::uint64_t HostCommunicator::mapped_bytes() const noexcept {
  std::uint64_t least = mapped_bytes_.load(std::memory_order_relaxed);
  if (least != 0) return least;
  least = ~std::uint64_t{0};
  for (const Peer& p : peers_) {
    least = std::min(least, p.control->window.load(std::memory_order_relaxed));
  }
  mapped_bytes_.store(least, std::memory_order_relaxed);
  return least;
}

std::byte* HostCommunicator::data_of(int p, std::uint64_t location, std::size_t i) const noexcept {
  if (machine_->one_process()) return reinterpret_cast<const TensorView*>(location)[i].data;
  return machine_->find(peer(p).machine_rank, location);
}

}  // namespace fastdist::host
