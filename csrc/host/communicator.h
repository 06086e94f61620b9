// Collectives between the ranks of one machine, through shared memory.
//
// Every collective starts with an exchange of headers: each rank writes one line that holds its
// sequence number and the signature of its call, and reads the lines of all others. Small payloads
// travel with it, so that a small collective is one hop. After the exchange every rank has seen
// every signature: where two differ all ranks know it, nothing has moved, and all throw.
//
// It also means that a rank which has published header s has finished collective s - 1. Hence two
// slots are enough (header s + 2 overwrites header s, which every rank has read by then), and the
// staging area is free as soon as all headers of a call have been seen.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/array_list.h"
#include "core/communicator.h"
#include "core/error.h"
#include "core/signature.h"
#include "host/layout.h"
#include "host/machine.h"
#include "host/tuning.h"

namespace fastdist::host {

class HostCommunicator final : public Communicator {
 public:
  // `members[i]` is the machine's rank of this communicator's rank i, `offsets[i]` the place of
  // its block (`block_bytes` long, zeroed) in its segment; `block` keeps the own one alive.
  HostCommunicator(std::shared_ptr<Machine> machine, std::vector<int> members, int rank,
                   const std::vector<std::size_t>& offsets, std::shared_ptr<SharedBlock> block,
                   const Tuning& tuning);
  // Closes. All calls must have ended.
  ~HostCommunicator() override;

  [[nodiscard]] static std::size_t block_bytes(int ranks, const Tuning& tuning);

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return static_cast<int>(peers_.size()); }
  [[nodiscard]] const std::shared_ptr<Machine>& machine() const noexcept { return machine_; }
  [[nodiscard]] const std::vector<int>& members() const noexcept { return members_; }
  [[nodiscard]] const Tuning& tuning() const noexcept { return tuning_; }

  // Throws kState when no call can be made any more: closed, lost, or a forked child's copy.
  void check_usable() const;
  // Calls that begin from now on belong to this phase of the caller's program, of kPhases that
  // repeat: they agree only with calls of the same phase. Ranks that do the same things in each
  // phase, one of which has left a phase early, so learn of it.
  void set_phase(std::uint8_t phase) noexcept { phase_.store(phase, std::memory_order_relaxed); }
  // A rank that has died, or given the communicator up after an error; from any thread.
  [[nodiscard]] std::optional<int> find_lost() const noexcept;
  // Leaves: peers that wait for this rank throw kPeerFailure. Wakes own calls of other threads.
  void close() noexcept;

  void all_reduce(TensorViews in, TensorViews out, ReduceOp op, const CallOptions&) override;
  void reduce(TensorViews in, TensorViews out, ReduceOp op, int root, const CallOptions&) override;
  void broadcast(TensorViews inout, int root, const CallOptions&) override;
  void all_gather(TensorView in, TensorView out, const CallOptions&) override;
  void gather(TensorView in, TensorView out, int root, const CallOptions&) override;
  void scatter(TensorView in, TensorView out, int root, const CallOptions&) override;
  void reduce_scatter(TensorView in, TensorView out, ReduceOp op, const CallOptions&) override;
  void all_to_all(TensorView in, TensorView out, std::span<const std::size_t> counts,
                  const CallOptions&) override;
  void send(TensorView in, int dst, const CallOptions&) override;
  void recv(TensorView out, int src, const CallOptions&) override;
  void barrier(const CallOptions&) override;

 private:
  struct Peer {
    int machine_rank;
    std::byte* block;
    Control* control;
    Lane* lanes;
    Header* slots[2];
  };
  struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;
    [[nodiscard]] std::size_t size() const noexcept { return end - begin; }
  };
  // The part of a run that one rank reduces in one round, and where it lies in the staging area.
  struct Slice {
    Range run;
    std::size_t staged;
  };
  // What a thread that waits needs to know.
  struct Wait {
    const CallOptions* options;
    Signature signature;
    Bell* bell;
    std::chrono::steady_clock::time_point start;
  };
  enum class Results { kEverywhere, kAtRoot, kOwnSlice };
  struct ReduceCall;
  struct PullPlan;
  struct Transfer;

  // communicator.cpp: announcing a call, waiting, using arrays in place.
  [[nodiscard]] Header& announce(const Signature& signature, const CallOptions& options);
  void exchange(Header& header);
  void compare_headers();
  [[nodiscard]] bool phases_differ() noexcept;
  void publish(Counter& counter, std::uint64_t value) noexcept;
  void await(int p, const Counter& counter, std::uint64_t value);
  void stall(int p, const Counter& counter, std::uint64_t value, Wait& wait);
  // Arrays are used in place between `begin_touching` and `end_touching`, each peer's after
  // `check_here`. A rank whose call fails owns its arrays again when the call throws, so it waits
  // for those who are at them (`withdraw`). One side stores that it touches and then looks
  // whether the other has departed, the other departs and then looks whether it is touched, all
  // sequentially consistent: at least one of them sees the other.
  void begin_touching() noexcept;
  void end_touching() noexcept;
  void check_here(int p);
  void withdraw() noexcept;
  void await_end_of(int p, const Counter& touching, std::uint64_t call) noexcept;
  void publish_facts() noexcept;
  void learn_cores() noexcept;
  [[nodiscard]] Peer& me() noexcept { return peers_[static_cast<std::size_t>(rank_)]; }
  [[nodiscard]] Peer& peer(int p) noexcept { return peers_[static_cast<std::size_t>(p)]; }
  [[nodiscard]] Header& header_of(int p) noexcept { return *peer(p).slots[sequence_ & 1]; }
  [[nodiscard]] std::byte* payload_of(int p, std::size_t bytes) noexcept {
    Header& header = header_of(p);
    return bytes <= header.payload.size() ? header.payload.data()
                                          : reinterpret_cast<std::byte*>(&header + 1);
  }
  [[nodiscard]] std::byte* input_of(int p, std::size_t round) noexcept {
    return peer(p).block + layout_.input(round & 1);
  }
  [[nodiscard]] std::byte* result_of(int p, std::size_t round) noexcept {
    return peer(p).block + layout_.result(round & 1);
  }

  // Where peers find the arrays of a run; 0: they cannot. See `data_of`.
  [[nodiscard]] std::uint64_t locate(TensorViews arrays) const noexcept;
  [[nodiscard]] std::uint64_t reach() const noexcept;
  // Array `i` of a run that rank p located.
  [[nodiscard]] std::byte* data_of(int p, std::uint64_t location, std::size_t i) const noexcept;

  // departures.cpp: peers that left, leaving, and saying why.
  void check_interrupt(const Wait& wait);
  void check_departures(const Wait& wait);
  void check_timeout(const Wait& wait, int p);
  [[nodiscard]] bool is_gone(int p) const noexcept;
  [[nodiscard]] std::string how_gone(int p) const;
  [[noreturn]] void give_up_on(int p, const Wait& wait);
  [[noreturn]] void depart(Departure why, int blamed, const Error& error);
  void leave(Departure why, int blamed) noexcept;
  void wake_everyone() noexcept;
  [[nodiscard]] std::uint64_t last_sequence(int p) const noexcept;
  [[nodiscard]] std::string last_calls() const;

  // reduce.cpp
  void reduce_arrays(TensorViews in, TensorViews out, ReduceOp op, Op name, int root,
                     const CallOptions& options);
  void reduce_run(const ReduceCall& call, const Signature& signature, const CallOptions& options);
  void reduce_announced(const ReduceCall& call, bool small);
  void reduce_payloads(const ReduceCall& call);
  void reduce_in_place(const ReduceCall& call);
  void reduce_staged(const ReduceCall& call);
  void expose_round(const ReduceCall& call, std::size_t round);
  void reduce_round(const ReduceCall& call, std::size_t round);
  void gather_round(const ReduceCall& call, std::size_t round);
  [[nodiscard]] Slice slice(const ReduceCall& call, std::size_t round, int owner) const noexcept;

  // pull.cpp
  void pull(const PullPlan& plan, const Signature& signature, const CallOptions& options);
  [[nodiscard]] std::size_t chunk_of(const PullPlan& plan, std::size_t source_bytes) const;
  void pull_announced(const PullPlan& plan, bool gives_staged);
  void pull_staged(const PullPlan& plan, bool gives_staged, bool stream);

  // lanes.cpp
  void open(Transfer& transfer);
  void publish(Transfer& transfer, Counter& counter, std::uint64_t value) noexcept;
  void await(Transfer& transfer, const Counter& counter, std::uint64_t value);
  void compare(Transfer& transfer);
  void fill(Transfer& transfer, std::uint64_t round);
  void push(Transfer& transfer);
  void take(Transfer& transfer);

  std::shared_ptr<Machine> machine_;
  std::vector<int> members_;
  int rank_;
  std::shared_ptr<SharedBlock> block_;
  Tuning tuning_;
  Layout layout_;
  std::vector<Peer> peers_;
  // How long to stay awake; several threads may find it out at once.
  std::atomic<bool> knows_cores_{false};
  std::atomic<std::chrono::nanoseconds> spin_;
  mutable std::atomic<std::uint64_t> reach_{0};
  std::atomic<bool> is_closed_{false};
  int generation_ = process_generation();
  std::atomic<std::uint8_t> phase_{0};
  std::uint64_t sequence_ = 0;
  Wait wait_{};                                 // of the collective that runs
  std::vector<const std::byte*> sources_;       // of the collective that runs: one per rank
  std::vector<std::byte*> targets_;             // of the collective that runs: one per rank
  std::vector<Range> gives_, takes_;            // of the collective that runs: one per rank
  std::vector<std::size_t> starts_;             // of the collective that runs: one per rank
  std::vector<std::uint64_t> sent_, received_;  // transfers so far, per peer
};

}  // namespace fastdist::host
