// Collectives between the ranks of one machine, through shared memory.
//
// Every collective starts with an exchange of headers: each rank writes one cache line with its
// sequence number and the signature of its call, and reads the lines of all others. Small payloads
// travel with the header, so a small collective takes one exchange. After the exchange every rank
// has seen every signature: if two differ, all ranks know, no data has moved, and all ranks throw.
//
// A rank that has published header s has finished collective s - 1. Hence two slots suffice (header
// s + 2 overwrites header s, which every rank has read by then), and the staging area is free as
// soon as all headers of a call have been seen.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/communicator.h"
#include "core/failure.h"
#include "core/signature.h"
#include "host/kernels.h"
#include "host/layout.h"
#include "host/machine.h"
#include "host/tuning.h"

namespace fastdist::host {

class HostCommunicator final : public BlockingCommunicator {
 public:
  // `members[i]` is the machine rank of this communicator's rank i, and `offsets[i]` the offset of
  // its block (`block_bytes` long, zeroed) in its segment. `block` keeps this rank's block alive.
  HostCommunicator(std::shared_ptr<Machine> machine, std::vector<int> members, int rank,
                   const std::vector<std::size_t>& offsets, std::shared_ptr<SharedBlock> block,
                   const Tuning& tuning);
  // Closes the communicator. All calls must have ended.
  ~HostCommunicator() override;

  [[nodiscard]] static std::size_t block_bytes(int ranks, const Tuning& tuning);

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return static_cast<int>(peers_.size()); }
  [[nodiscard]] const std::shared_ptr<Machine>& machine() const noexcept { return machine_; }
  [[nodiscard]] const std::vector<int>& members() const noexcept { return members_; }
  [[nodiscard]] const Tuning& tuning() const noexcept { return tuning_; }

  void check_usable() const override;
  [[nodiscard]] bool has_closed(int p) const noexcept override;
  [[nodiscard]] std::optional<int> find_lost() const noexcept override;
  void close() noexcept override;
  void count_submitted(int change) noexcept override { submitted_.fetch_add(change); }
  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes) override;
  // Returns another rank whose process has died in use of the communicator. Thread-safe.
  [[nodiscard]] std::optional<int> find_dead() const noexcept;
  // Sets the numbers of the ranks in errors, for ranks that are part of a job of `job_size` ranks.
  void set_labels(std::vector<int> labels, int job_size) {
    labels_ = std::move(labels);
    job_size_ = job_size;
  }
  // Gives up for a reason beyond this machine, which all ranks then throw. Thread-safe.
  void abandon(const Failure& reason) noexcept { announce(reason, RankState::kTold); }
  // Returns the reason for which a rank has called `abandon`. Thread-safe.
  [[nodiscard]] std::optional<Failure> find_told() const;
  // Returns why this rank has failed. Thread-safe.
  [[nodiscard]] std::optional<Failure> failure() const { return failure_of(rank_); }

  void all_reduce(TensorViews in, TensorViews out, ReduceOp op,
                  const CallOptions& options) override {
    reduce_arrays(in, out, op, Op::kAllReduce, 0, options);
  }
  void reduce(TensorViews in, TensorViews out, ReduceOp op, int root,
              const CallOptions& options) override {
    reduce_arrays(in, out, op, Op::kReduce, root, options);
  }
  void broadcast(TensorViews inout, int root, const CallOptions&) override;
  void all_gather(TensorView in, TensorView out, const CallOptions&) override;
  void gather(TensorView in, TensorView out, int root, const CallOptions&) override;
  void scatter(TensorView in, TensorView out, int root, const CallOptions&) override;
  void reduce_scatter(TensorView in, TensorView out, ReduceOp op,
                      const CallOptions& options) override {
    reduce_arrays({&in, 1}, {&out, 1}, op, Op::kReduceScatter, 0, options);
  }
  void all_to_all(TensorView in, TensorView out, std::span<const std::size_t> counts,
                  const CallOptions&) override;
  void send(TensorView in, int dst, const CallOptions&) override;
  void recv(TensorView out, int src, const CallOptions&) override;
  [[nodiscard]] std::optional<Message> find_message(int src) override;
  [[nodiscard]] Message await_message(int src, TensorView out, const CallOptions&) override;
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
  // True for arrays of so many bytes that a slot has room for beside the header.
  [[nodiscard]] bool travels_with_header(std::size_t bytes) const noexcept {
    return bytes <= tuning_.slot_bytes;
  }
  // The part of a run that one rank reduces in one round, and its offset in the staging area.
  struct Slice {
    Range run;
    std::size_t staged;
  };
  // The state of a waiting thread.
  struct Wait {
    const CallOptions* options;
    Signature signature;
    Bell* bell;
    bool needs_all;  // until all ranks have announced a collective
    std::chrono::steady_clock::time_point start;
    std::uint64_t number = 0;  // in `Control::blocked`, once published
    bool is_shown = false;     // in other communicators too
    bool is_late = false;      // another rank was waited for
    // Begins the wait of a collective. Field by field: a copy of a whole Wait that was just made
    // waits for the stores of its fields.
    void begin(const CallOptions& call_options, const Signature& call, Bell& own) noexcept {
      options = &call_options;
      signature = call;
      bell = &own;
      needs_all = true;
      start = {};
      number = 0;
      is_shown = false;
      is_late = false;
    }
    // The call for messages.
    [[nodiscard]] const Signature& shown() const noexcept {
      return options->shown != nullptr ? *options->shown : signature;
    }
  };
  // A rank's published wait, if it has not ended.
  struct Blocked {
    std::uint64_t number;
    int rank;  // that must act
    Reach reach;
  };
  struct LaneState {
    std::uint64_t transfers = 0;
    std::size_t position = 0;  // in the lane's ring, the same on both ranks
    CopyToPeers copy;
  };
  struct ReduceCall;
  struct PullPlan;
  struct Transfer;

  // communicator.cpp: announces calls, waits, accesses arrays in place.
  [[nodiscard]] Header& announce(const Signature& signature, const CallOptions& options);
  void exchange(Header& header);
  [[noreturn]] void throw_mismatch();
  void publish(Counter& counter, std::uint64_t value) noexcept;
  void await(int p, const Counter& counter, std::uint64_t value);
  void await_slowly(int p, const Counter& counter, std::uint64_t value, Wait& wait);
  // Arrays are used in place between `begin_access` and `end_access`; each peer's arrays only after
  // `check_active` for that peer. When a call fails, its arrays belong to the caller again as soon
  // as it throws, so it first waits for ranks that use them (`await_accesses`), but not longer than
  // a second: a rank may be stopped. Hence an accessing rank checks its peers again afterwards, as
  // it may have read what a failed rank has changed since. The accessing rank
  // stores `accessing` and then loads the peer's state; the failing rank stores its state and then
  // loads `accessing`. All four are sequentially consistent, so at least one rank sees the other's
  // store.
  void begin_access() noexcept {
    me().control->accessing.store(sequence_, std::memory_order_seq_cst);
  }
  void end_access() noexcept;
  void check_active(int p);
  void await_accesses();
  void await_access_end(int p, const Counter& accessing, std::uint64_t call);
  [[nodiscard]] bool is_crowded() noexcept;
  [[nodiscard]] int label(int p) const noexcept {
    return labels_.empty() ? p : labels_[static_cast<std::size_t>(p)];
  }
  [[nodiscard]] const Peer& peer(int p) const noexcept {
    return peers_[static_cast<std::size_t>(p)];
  }
  [[nodiscard]] const Peer& me() const noexcept { return peer(rank_); }
  [[nodiscard]] RankState state_of(
      int p, std::memory_order order = std::memory_order_acquire) const noexcept {
    return peer(p).control->state.load(order);
  }
  [[nodiscard]] Header& header_of(int p) noexcept { return *peer(p).slots[sequence_ & 1]; }
  [[nodiscard]] std::byte* payload_of(int p, std::size_t bytes) noexcept {
    Header& header = header_of(p);
    return bytes <= header.payload.size() ? header.payload.data()
                                          : reinterpret_cast<std::byte*>(&header + 1);
  }
  [[nodiscard]] std::byte* input_of(int p, const Turn& turn, std::size_t round) noexcept {
    return peer(p).block + layout_.inputs() + turn.part(round) * turn.chunk();
  }
  [[nodiscard]] std::byte* result_of(int p, const Turn& turn, std::size_t round) noexcept {
    return peer(p).block + layout_.results() +
           turn.part(round) * layout_.result_bytes(turn.chunk());
  }

  // Returns where peers find the arrays of a run, or 0 if they cannot access them. See `data_of`.
  [[nodiscard]] std::uint64_t locate(TensorViews arrays) const noexcept;
  [[nodiscard]] std::uint64_t mapped_bytes() const noexcept;
  // Returns array `i` of a run that rank p located.
  [[nodiscard]] std::byte* data_of(int p, std::uint64_t location, std::size_t i) const noexcept;

  // deadlock.cpp: detects ranks that wait for each other, such as one in send and one in barrier.
  void check_deadlock(int p, const Counter& counter, std::uint64_t value, Wait& wait);
  void publish_wait(int p, const Counter& counter, std::uint64_t value, const Wait& wait,
                    Reach reach, const std::string& site) noexcept;
  void show_elsewhere(int p, const Counter& counter, std::uint64_t value, Wait& wait);
  void hide_elsewhere(Wait& wait) noexcept;
  void withdraw(const Wait& wait) noexcept;
  [[nodiscard]] std::optional<Failure> find_deadlock_of(const Wait& wait);
  void mark_failing_waits(const Failure& failure) noexcept;
  void mark_waits_for_this_rank() noexcept;
  void mark_failing_wait(int p) noexcept;
  void end_wait(Wait& wait) noexcept;
  [[nodiscard]] std::optional<Blocked> blocked(int p) const noexcept;
  [[nodiscard]] std::vector<int> find_deadlock() const;
  [[nodiscard]] std::string waits() const;

  // failures.cpp: detects peers that have left, announces failures and describes them.
  void check_interrupt(const Wait& wait);
  void check_failures(const Wait& wait);
  void check_timeout(const Wait& wait, int p);
  [[nodiscard]] bool has_left(int p) const noexcept;
  [[nodiscard]] std::optional<int> find_left(int p, const Wait& wait) const noexcept;
  [[nodiscard]] std::optional<Failure> failure_of(int p,
                                                  RankState least = RankState::kFailed) const;
  [[noreturn]] void throw_peer_failure(int p, const Wait& wait);
  [[noreturn]] void fail(const Failure& failure, const Wait& wait);
  void announce(const Failure& failure, RankState state) noexcept;
  bool tell(const Failure& failure, RankState state) noexcept;
  void wake_everyone() noexcept;
  [[nodiscard]] std::uint64_t last_sequence(int p) const noexcept;
  [[nodiscard]] std::vector<LastCall> last_calls() const;

  // reduce.cpp
  void reduce_arrays(TensorViews in, TensorViews out, ReduceOp op, Op name, int root,
                     const CallOptions& options);
  void reduce_run(ReduceCall& call, const Signature& signature, const CallOptions& options);
  void reduce_announced(ReduceCall& call, bool small);
  void reduce_payloads(const ReduceCall& call);
  void reduce_in_place(const ReduceCall& call);
  void reduce_staged(ReduceCall& call);
  [[nodiscard]] std::size_t chunk_of_round(std::size_t bytes) noexcept;
  void expose_round(const ReduceCall& call, const Turn& turn, std::size_t round);
  void reduce_round(const ReduceCall& call, const Turn& turn, std::size_t round);
  void gather_round(const ReduceCall& call, const Turn& turn, std::size_t round);
  [[nodiscard]] Slice slice(const ReduceCall& call, std::size_t round, int owner) const noexcept;

  // pull.cpp
  void pull(const PullPlan& plan, const Signature& signature, const CallOptions& options);
  void pull_announced(const PullPlan& plan, bool stages_input);
  [[nodiscard]] bool stages_input_of(int p) noexcept;
  class StagedPull;

  // lanes.cpp
  void open(Transfer& transfer);
  void publish(Transfer& transfer, Counter& counter, std::uint64_t value) noexcept;
  void await(Transfer& transfer, const Counter& counter, std::uint64_t value);
  void compare(Transfer& transfer);
  [[nodiscard]] static Message message_in(const Header& header) noexcept;
  [[nodiscard]] Header& next_header(int src) noexcept;
  void fill(Transfer& transfer, std::uint64_t round);
  void send_chunks(Transfer& transfer);
  void receive_chunks(Transfer& transfer);

  std::shared_ptr<Machine> machine_;
  std::vector<int> members_;
  std::vector<int> labels_;
  int job_size_ = static_cast<int>(members_.size());
  int rank_;
  std::shared_ptr<SharedBlock> block_;
  Tuning tuning_;
  Layout layout_;
  std::vector<Peer> peers_;
  std::atomic<int> cores_{0};  // of all ranks, 0 if unknown; several threads may set it at once
  mutable std::atomic<std::uint64_t> mapped_bytes_{0};
  std::atomic<bool> is_closed_{false};
  int generation_ = process_generation();
  std::atomic<int> submitted_{0};
  std::mutex announce_mutex_;
  std::mutex publish_mutex_;  // two threads may send and receive
  std::uint64_t sequence_ = 0;
  std::size_t position_ = 0;  // in the rings, the same on all ranks
  CopyToPeers copy_to_peers_;
  alignas(kCacheLine) std::array<std::byte, kBlock> scratch_{};  // results on their way
  Wait wait_{};                                                  // of the current collective
  std::vector<const std::byte*> sources_;    // of the current collective, per rank
  std::vector<std::byte*> targets_;          // of the current collective, per rank
  std::vector<Range> outgoing_, incoming_;   // of the current collective, per rank
  std::vector<std::size_t> source_offsets_;  // of the current collective, per rank
  std::vector<LaneState> sent_, received_;   // per peer
};

}  // namespace fastdist::host
