#include "host/communicator.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <thread>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace fastdist::host {
namespace {

using Clock = std::chrono::steady_clock;

// How often a sleeping rank looks whether its peers live and whether it is interrupted.
constexpr std::chrono::milliseconds kPatrol{50};
constexpr int kSpinsPerClock = 32;

}  // namespace

std::size_t HostCommunicator::block_bytes(int ranks, const Tuning& tuning) {
  const std::size_t lines = static_cast<std::size_t>(ranks) * kCacheLine;
  if (tuning.chunk_bytes < lines || tuning.chunk_bytes % kCacheLine != 0 ||
      tuning.lane_bytes == 0) {
    throw Error(ErrorCode::kValue, "chunk_bytes must be a multiple of 64 and at least " +
                                       std::to_string(lines) + " for " + std::to_string(ranks) +
                                       " ranks, lane_bytes at least 1; got " +
                                       std::to_string(tuning.chunk_bytes) + " and " +
                                       std::to_string(tuning.lane_bytes));
  }
  return Layout{ranks, tuning.slot_bytes, tuning.chunk_bytes, tuning.lane_bytes}.bytes();
}

HostCommunicator::HostCommunicator(std::shared_ptr<Machine> machine, std::vector<int> members,
                                   int rank, const std::vector<std::size_t>& offsets,
                                   std::shared_ptr<SharedBlock> block, const Tuning& tuning)
    : machine_(std::move(machine)),
      members_(std::move(members)),
      rank_(rank),
      block_(std::move(block)),
      tuning_(tuning),
      layout_{static_cast<int>(members_.size()), tuning.slot_bytes, tuning.chunk_bytes,
              tuning.lane_bytes},
      sources_(members_.size()),
      targets_(members_.size()),
      gives_(members_.size()),
      takes_(members_.size()),
      starts_(members_.size()),
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
  spin_ = tuning.spin;
  publish_facts();
}

HostCommunicator::~HostCommunicator() {
  close();
  if (generation_ != process_generation()) return;
  // No call of this rank touches the peers' blocks any more. They may still read this rank's: it
  // is free when all of them are done with it.
  for (Peer& p : peers_) p.control->closed.fetch_add(1, std::memory_order_acq_rel);
  machine_->retire(block_, [control = me().control, n = size()] {
    return control->closed.load(std::memory_order_acquire) == static_cast<std::uint32_t>(n);
  });
}

void HostCommunicator::close() noexcept {
  if (generation_ != process_generation() || is_closed_.exchange(true)) return;
  auto active = static_cast<std::uint32_t>(Departure::kActive);
  me().control->departure.compare_exchange_strong(active,
                                                  static_cast<std::uint32_t>(Departure::kClosed));
  wake_everyone();
}

void HostCommunicator::publish_facts() noexcept {
  me().control->window.store(machine_->window_bytes(), std::memory_order_relaxed);
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) != 0) return;
  auto& published = me().control->cores;
  for (std::size_t i = 0; i < CPU_SETSIZE && i < 64 * published.size(); ++i) {
    if (CPU_ISSET(i, &cores)) {
      published[i / 64].fetch_or(std::uint64_t{1} << i % 64, std::memory_order_relaxed);
    }
  }
}

// Ranks may be bound to cores, so how crowded it is shows in the cores of all ranks together. Asked
// while waiting, until every rank has published its own.
void HostCommunicator::learn_cores() noexcept {
  int total = 0;
  std::array<std::uint64_t, std::tuple_size_v<decltype(Control::cores)>> all{};
  for (const Peer& p : peers_) {
    std::uint64_t any = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::uint64_t word = p.control->cores[i].load(std::memory_order_relaxed);
      any |= word;
      all[i] |= word;
    }
    if (any == 0) return;
  }
  for (const std::uint64_t word : all) total += std::popcount(word);
  spin_.store(size() > total ? tuning_.spin_crowded : tuning_.spin, std::memory_order_relaxed);
  knows_cores_.store(true, std::memory_order_relaxed);
}

void HostCommunicator::check_usable() const {
  if (generation_ != process_generation()) {
    throw Error(ErrorCode::kState,
                "the communicator belongs to the parent process; a forked child cannot use it");
  }
  const auto* control = peers_[static_cast<std::size_t>(rank_)].control;
  switch (static_cast<Departure>(control->departure.load(std::memory_order_seq_cst))) {
    case Departure::kActive:
      return;
    case Departure::kClosed:
      throw Error(ErrorCode::kState, "the communicator is closed on rank " + std::to_string(rank_));
    case Departure::kTimeout:
    case Departure::kPeerFailure:
    case Departure::kInterrupted:
      throw Error(ErrorCode::kState, "the communicator cannot be used any more on rank " +
                                         std::to_string(rank_) +
                                         ": an earlier call failed half-way; make a new one");
  }
}

Header& HostCommunicator::announce(const Signature& signature, const CallOptions& options) {
  check_usable();
  if (machine_->one_process()) options.caller->may_block();
  ++sequence_;
  Signature told = options.whole != nullptr ? *options.whole : signature;
  told.phase = phase_.load(std::memory_order_relaxed);
  wait_ = {&options, told, &me().control->bell, {}};
  Header& header = header_of(rank_);
  header.signature.store(told.packed(), std::memory_order_relaxed);
  header.count.store(told.count, std::memory_order_relaxed);
  header.list.store(told.list, std::memory_order_relaxed);
  header.input.store(0, std::memory_order_relaxed);
  header.output.store(0, std::memory_order_relaxed);
  return header;
}

void HostCommunicator::exchange(Header& header) {
  publish(header.sequence, sequence_);
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) await(p, header_of(p).sequence, sequence_);
  }
  const Signature& signature = wait_.signature;
  const std::uint64_t packed = signature.packed();
  for (int p = 0; p < size(); ++p) {
    const Header& theirs = header_of(p);
    if (theirs.signature.load(std::memory_order_relaxed) != packed ||
        theirs.count.load(std::memory_order_relaxed) != signature.count ||
        theirs.list.load(std::memory_order_relaxed) != signature.list) {
      compare_headers();
    }
  }
}

void HostCommunicator::begin_touching() noexcept {
  me().control->touching.store(sequence_, std::memory_order_seq_cst);
}

void HostCommunicator::end_touching() noexcept {
  // An exchange, since it drains stores that bypassed the caches.
  me().control->touching.exchange(0, std::memory_order_seq_cst);
}

void HostCommunicator::check_here(int p) {
  if (peer(p).control->departure.load(std::memory_order_seq_cst) ==
      static_cast<std::uint32_t>(Departure::kActive)) {
    return;
  }
  end_touching();
  check_departures(wait_);
  give_up_on(p, wait_);
}

void HostCommunicator::withdraw() noexcept {
  for (int p = 0; p < size(); ++p) await_end_of(p, peer(p).control->touching, sequence_);
}

// Nothing keeps a rank from ending what it touches, but its own end.
void HostCommunicator::await_end_of(int p, const Counter& touching, std::uint64_t call) noexcept {
  if (p == rank_) return;
  while (touching.load(std::memory_order_seq_cst) == call &&
         machine_->is_alive(peer(p).machine_rank)) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Signatures differ, and every rank knows it. Each writes down where it was called from, waits for
// the others to do so, and throws; nothing has moved, so the next call finds all in order.
void HostCommunicator::compare_headers() {
  const Signature& signature = wait_.signature;
  CallSite& site = me().control->site;
  site.write(wait_.options->caller->location());
  publish(site.call, sequence_);

  std::string message = "ranks called different collectives (call " + std::to_string(sequence_) +
                        ", seen from rank " + std::to_string(rank_) + " of " +
                        std::to_string(size()) + "):";
  std::vector<int> ranks;
  const bool out_of_phase = phases_differ();
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) await(p, peer(p).control->site.call, sequence_);
    const Header& h = header_of(p);
    const Signature theirs = unpack_signature(h.signature.load(std::memory_order_relaxed),
                                              h.count.load(std::memory_order_relaxed),
                                              h.list.load(std::memory_order_relaxed));
    if (theirs.packed() != signature.packed() || theirs.count != signature.count ||
        theirs.list != signature.list) {
      ranks.push_back(p);
    }
    message += "\n  rank " + std::to_string(p) + ": " + describe(theirs);
    if (out_of_phase) message += " in phase " + std::to_string(theirs.phase);
    const char* text = peer(p).control->site.text.data();
    if (*text != '\0') message += std::string(" at ") + text;
  }
  throw Error(ErrorCode::kMismatch, message, std::move(ranks));
}

bool HostCommunicator::phases_differ() noexcept {
  for (int p = 0; p < size(); ++p) {
    const std::uint64_t packed = header_of(p).signature.load(std::memory_order_relaxed);
    if (unpack_signature(packed, 0, 0).phase != wait_.signature.phase) return true;
  }
  return false;
}

// An exchange and not a store: it comes before the looks into the bells, and it drains stores that
// bypassed the caches.
void HostCommunicator::publish(Counter& counter, std::uint64_t value) noexcept {
  counter.exchange(value, std::memory_order_seq_cst);
  for (Peer& p : peers_) p.control->bell.ring_if_waiting(rank_);
}

void HostCommunicator::await(int p, const Counter& counter, std::uint64_t value) {
  if (counter.load(std::memory_order_acquire) >= value) return;
  stall(p, counter, value, wait_);
}

void HostCommunicator::stall(int p, const Counter& counter, std::uint64_t value, Wait& wait) {
  const auto ready = [&] { return counter.load(std::memory_order_seq_cst) >= value; };
  for (int i = 0; i < kSpinsPerClock; ++i) {
    if (ready()) return;
    cpu_relax();
  }
  wait.options->caller->may_block();
  if (!knows_cores_.load(std::memory_order_relaxed)) learn_cores();
  // The peer may be waiting for this very core: after a moment, offer it.
  const std::chrono::nanoseconds spin = spin_.load(std::memory_order_relaxed);
  const auto start = Clock::now();
  for (auto now = start; now - start < spin; now = Clock::now()) {
    if (now - start > tuning_.hold) std::this_thread::yield();
    for (int i = 0; i < kSpinsPerClock; ++i) {
      if (ready()) return;
      cpu_relax();
    }
  }
  wait.start = start;
  auto patrol = start;
  while (!ready()) {
    wait.bell->sleep(static_cast<std::uint32_t>(p) + 1, kPatrol, ready);
    if (ready()) return;
    check_departures(wait);
    const auto now = Clock::now();
    if (now - patrol < kPatrol) continue;
    patrol = now;
    check_interrupt(wait);
    const bool gone = is_gone(p);
    if (ready()) return;  // what it published before it left still counts
    if (gone) give_up_on(p, wait);
    check_timeout(wait, p);
  }
}

std::uint64_t HostCommunicator::locate(TensorViews arrays) const noexcept {
  if (machine_->one_process()) return reinterpret_cast<std::uint64_t>(arrays.data());
  if (arrays.size() != 1) return 0;
  const int own = peers_[static_cast<std::size_t>(rank_)].machine_rank;
  const std::uint64_t location = machine_->locate(own, arrays[0].data);
  return location != 0 && location + arrays[0].bytes() <= reach() ? location : 0;
}

// How much of a window every rank has mapped: where the address space of one is limited, less than
// this rank has. 0 until all have told.
std::uint64_t HostCommunicator::reach() const noexcept {
  std::uint64_t least = reach_.load(std::memory_order_relaxed);
  if (least != 0) return least;
  least = ~std::uint64_t{0};
  for (const Peer& p : peers_) {
    least = std::min(least, p.control->window.load(std::memory_order_relaxed));
  }
  reach_.store(least, std::memory_order_relaxed);
  return least;
}

std::byte* HostCommunicator::data_of(int p, std::uint64_t location, std::size_t i) const noexcept {
  if (machine_->one_process()) return reinterpret_cast<const TensorView*>(location)[i].data;
  return machine_->find(peers_[static_cast<std::size_t>(p)].machine_rank, location);
}

}  // namespace fastdist::host
