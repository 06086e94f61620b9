// Collectives between ranks on several machines: shared memory within each machine, TCP across.
//
// Every collective starts with one crossing that gives every rank the records of all ranks: the
// number and signature of the call, and its input if that has at most a few hundred bytes. If the
// signatures differ, every rank knows, no data has moved, and all ranks throw. A small collective
// ends there. In a large one each rank carries its share of the bytes over its own connections, in
// chunks: while one crosses, a machine's ranks reduce the next and distribute the previous one.
//
// A reduction of any size follows one binary tree over the ranks' numbers (core/reduction_tree.h).
// A machine sends the value of each of the largest subtrees whose ranks it has: one if its ranks
// are an aligned block of a power of two. So the bits are the same wherever the ranks run. 16-bit
// and 8-bit floats are reduced in float32.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/communicator.h"
#include "core/failure.h"
#include "core/file_descriptor.h"
#include "core/process.h"
#include "core/reduction_tree.h"
#include "core/signature.h"
#include "host/communicator.h"
#include "net/answers.h"
#include "net/link_model.h"
#include "net/stream.h"

namespace fastdist::net {

// Where a rank runs. Ranks with the same `machine` share memory.
struct Place {
  int machine;
  std::string ip;
};

// The connections between two ranks. `out` carries what this rank sends, and the peer's answers;
// `in` carries what the peer sends, and this rank's answers. `stream` carries collectives, and is
// unset between ranks of one machine.
struct Connections {
  FileDescriptor out;
  FileDescriptor in;
  FileDescriptor stream;
};

// Ranks of a machine wait longer for each further step of a collective among them, so that the rank
// that knows which rank is late raises first.
inline constexpr std::chrono::milliseconds kGrace{300};

class NetCommunicator final : public BlockingCommunicator {
 public:
  // `inner` connects the ranks of this machine, in ascending order. Ranks with equal
  // `places[p].machine` share memory.
  NetCommunicator(std::shared_ptr<host::HostCommunicator> inner, int rank,
                  std::vector<Place> places, std::vector<Connections> connections);
  // Closes the communicator. All calls must have ended.
  ~NetCommunicator() override;

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return static_cast<int>(places_.size()); }
  // Measures the links between the machines. Every rank must call.
  void measure_links(const CallOptions& options);
  [[nodiscard]] const LinkModel& links() const noexcept { return links_; }
  void set_links(const LinkModel& links) noexcept { links_ = links; }
  // Counts a machine as lost that has been silent for so long; 0: it may come back.
  void set_patience(std::chrono::milliseconds patience) noexcept { patience_ = patience; }

  void check_usable() const override;
  void close() noexcept override;
  void count_submitted(int change) noexcept override { submitted_.fetch_add(change); }
  [[nodiscard]] bool has_closed(int p) const noexcept override;
  [[nodiscard]] std::optional<int> find_lost() const noexcept override;
  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes) override;

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
  void reduce_scatter(TensorView in, TensorView out, ReduceOp op, const CallOptions&) override;
  void all_to_all(TensorView in, TensorView out, std::span<const std::size_t> counts,
                  const CallOptions&) override;
  void send(TensorView in, int dst, const CallOptions&) override;
  void recv(TensorView out, int src, const CallOptions&) override;
  [[nodiscard]] std::optional<Message> find_message(int src) override;
  [[nodiscard]] Message await_message(int src, TensorView out, const CallOptions&) override;
  void barrier(const CallOptions&) override;

 private:
  using Clock = std::chrono::steady_clock;

  // Another rank. `stream` is unset for ranks of this machine.
  struct Peer {
    Peer(Connections connections, int ranks)
        : stream(std::move(connections.stream)),
          out(std::move(connections.out)),
          in(std::move(connections.in)),
          answers(out.get(), ranks),
          writer(in.get()) {}
    Stream stream;
    FileDescriptor out;  // this rank's sends
    FileDescriptor in;   // the peer's sends
    AnswerReader answers;
    AnswerWriter writer;
    std::atomic<std::uint32_t> sent{0};      // number of transfers
    std::atomic<std::uint32_t> received{0};  // number of transfers
    std::atomic<bool> sends{false};          // a thread waits for an answer
    std::atomic<std::int64_t> ended_at{0};   // when the end of the connection was noticed
  };

  // What a rank tells all others about its call.
  static constexpr std::size_t kPayload = 464;
  struct Record {
    CallHead head;
    std::array<std::byte, kPayload> payload{};
  };

  // The call in which a thread of this rank waits: a collective, or transfer `number` of a lane.
  struct Wait : NonCopyable {
    Wait(std::atomic<int>& calls, const Signature& call, const Caller* who,
         std::uint32_t transfer = 0)
        : signature(call), caller(who), number(transfer), calls_(calls) {
      calls_.fetch_add(1);
    }
    ~Wait() { calls_.fetch_sub(1); }
    Signature signature;
    const Caller* caller;
    std::uint32_t number;
    Clock::time_point since = Clock::now();
    Clock::time_point asked_at = Clock::now();
    std::uint64_t question = 0;
    std::uint64_t id = 0;             // random; 0 until the rank tells others about the wait
    std::optional<std::string> site;  // see `line_of`

   private:
    std::atomic<int>& calls_;
  };

  // Makes waits for ranks of this machine notice events on other machines.
  class Watcher final : public Caller {
   public:
    // `moves` is true for a collective: its bytes between machines move on meanwhile.
    Watcher(NetCommunicator& communicator, Wait& wait, bool moves)
        : communicator_(communicator), wait_(wait), moves_(moves) {}
    [[nodiscard]] std::string location() const override { return wait_.caller->location(); }
    void check_interrupt() const override {
      wait_.caller->check_interrupt();
      communicator_.check_failures(wait_);
      if (moves_) communicator_.progress();
    }
    void may_block() const override { wait_.caller->may_block(); }
    [[nodiscard]] bool is_alone() const override { return wait_.caller->is_alone(); }

   private:
    NetCommunicator& communicator_;
    Wait& wait_;
    bool moves_;
  };

  // Memory that all ranks of the machine can read and that grows as needed.
  class Buffer {
   public:
    std::byte* of(host::HostCommunicator& inner, std::size_t bytes) {
      if (bytes > bytes_) {
        bytes_ = 0;  // without memory, if allocating throws
        memory_.reset();
        memory_ = inner.allocate(bytes);
        bytes_ = bytes;
      }
      return memory_.get();
    }

   private:
    std::shared_ptr<std::byte> memory_;
    std::size_t bytes_ = 0;
  };

  // A reduction of a run of arrays with the same dtype.
  struct Reduction;
  // What a rank sends to its partners and receives from them. Machine i is sent `bytes` at i ·
  // `step`; what it sends comes to places from[i] to from[i + 1] in units of `unit` bytes.
  struct Parts {
    const std::byte* out;
    std::size_t step;
    std::size_t bytes;
    std::byte* in;
    std::span<const std::size_t> from;
    std::size_t unit;
  };

  // communicator.cpp
  void run(const Signature& signature, const CallOptions& options, TensorViews payload,
           const std::function<void()>& finish_payload, const std::function<void()>& body);
  void share(const std::byte* own, std::size_t bytes, std::byte* everyone);
  void compare();
  [[noreturn]] void throw_mismatch();
  void inside(int grace, const auto& call);  // a call between the ranks of this machine

  // wait.cpp
  void post_send(int p, const std::byte* data, std::size_t bytes);
  void post_receive(int p, std::byte* data, std::size_t bytes);
  void note_busy(int p);
  void await_received(int p, std::uint64_t bytes);
  void await_received(int p) { await_received(p, peer(p).stream.to_receive()); }
  void await_sent(int p) { await_sent(p, peer(p).stream.to_send()); }
  void await_sent(int p, std::uint64_t bytes);
  void await_all_received();
  void await_all_sent();
  // Wait until so many bytes have come from the partner on each other machine, or have left to it.
  void await_from_partners(const std::vector<std::uint64_t>& bytes);
  void await_to_partners(const std::vector<std::uint64_t>& bytes);
  bool progress();
  void await(int p, const std::function<bool()>& ready);

  // failures.cpp
  void check_failures(Wait& wait);
  [[noreturn]] void throw_ended(int p, const Signature& signature);
  [[noreturn]] void throw_late(int p, Wait& wait, Clock::duration waited);
  [[noreturn]] void throw_unreachable(int p, const Wait& wait);
  [[noreturn]] void throw_inner(const Error& error, Wait& wait);
  [[noreturn]] void throw_told(const Failure& failure, const Signature& signature);
  [[noreturn]] void fail(const Failure& failure, const Signature& signature);
  void abandon(const Failure& failure) noexcept;
  void check_silence(const Wait& wait);
  [[nodiscard]] bool is_unreachable(int p, std::chrono::milliseconds silence) const;
  [[nodiscard]] std::vector<LastCall> last_calls() const;

  // deadlock.cpp
  void check_deadlock(Wait& wait);
  void answer_questions(Wait& wait, NetCommunicator& waiting);
  void speak_elsewhere(Wait& wait);
  static const std::string& line_of(Wait& wait);
  std::uint64_t ask_all();
  [[nodiscard]] std::vector<int> find_late(Wait& wait, const std::vector<int>& suspects);
  [[nodiscard]] Waiting state_of(Wait& wait, NetCommunicator& waiting) const;
  [[nodiscard]] std::vector<std::optional<Waiting>> answers_in(Wait& wait);
  [[nodiscard]] std::vector<int> missing_in(Wait& wait);
  [[nodiscard]] CallHead last_call(int p) const;
  [[nodiscard]] CallHead head_of(const Signature& call) const noexcept {
    return {sequence_, call.packed(), call.count, call.list};
  }

  // partials.cpp
  void plan_partials();
  [[nodiscard]] std::size_t first_partial(int machine) const {
    return first_partial_[static_cast<std::size_t>(machine)];
  }
  [[nodiscard]] std::size_t all_partials() const { return first_partial_.back(); }
  // Sums cross in the dtype in which they are computed: small floats in float32, so that they are
  // rounded once. Means cross as sums.
  [[nodiscard]] static DType dtype_of_sums(DType dtype) noexcept;
  [[nodiscard]] static ReduceOp summed(ReduceOp op) noexcept {
    return op == ReduceOp::kMean ? ReduceOp::kSum : op;
  }
  static void narrow(DType wide, const std::byte* from, DType dtype, std::byte* to,
                     std::size_t count);
  void reduce_here(const std::byte* gathered, std::size_t stride, DType dtype, ReduceOp op,
                   std::byte* to, std::size_t parts, std::size_t count) const;

  // reduce.cpp
  void reduce_arrays(TensorViews in, TensorViews out, ReduceOp op, Op name, int root,
                     const CallOptions& options);
  void reduce_payloads(const Reduction& call);
  void reduce_chunks(Reduction& call);
  void load(Reduction& call, std::size_t chunk);
  [[nodiscard]] std::byte* pack(Reduction& call, std::size_t chunk, std::size_t padded);
  void send_share(Reduction& call, std::size_t chunk);
  void cross(Reduction& call, std::size_t slot, bool to_all, const Parts& parts,
             std::vector<std::uint64_t>& arrived);
  void combine(Reduction& call, std::size_t chunk);
  void finish(Reduction& call, std::size_t chunk);

  // move.cpp
  void broadcast_chunks(TensorViews inout, int root);
  void copy_payloads(std::byte* to, std::size_t bytes) const;
  void exchange(std::byte* in, std::byte* out, const auto& bytes_between);
  void gather_here(TensorView in, std::byte* out, int root);

  // lanes.cpp
  void transfer(const Signature& signature, int p, std::uint32_t number, const CallOptions& options,
                const auto& here, const auto& across);
  void await_lane(int p, int fd, short events, Wait& wait, const CallOptions& options,
                  Clock::time_point& last_check);
  void send_across(TensorView in, int dst, Wait& wait, const CallOptions& options);
  void recv_across(TensorView out, int src, Wait& wait, const CallOptions& options);

  [[nodiscard]] Peer& peer(int p) { return *peers_[static_cast<std::size_t>(p)]; }
  [[nodiscard]] const Peer& peer(int p) const { return *peers_[static_cast<std::size_t>(p)]; }
  [[nodiscard]] int machine_of(int p) const { return places_[static_cast<std::size_t>(p)].machine; }
  [[nodiscard]] bool is_here(int p) const { return machine_of(p) == machine_of(rank_); }
  [[nodiscard]] int local_of(int p) const { return local_[static_cast<std::size_t>(p)]; }
  [[nodiscard]] const std::vector<int>& ranks_of(int machine) const {
    return machines_[static_cast<std::size_t>(machine)];
  }
  // Returns true if the ranks of this machine have consecutive numbers.
  [[nodiscard]] bool is_contiguous() const {
    const std::vector<int>& here = ranks_of(machine_of(rank_));
    return here.back() - here.front() + 1 == width();
  }
  [[nodiscard]] int machines() const { return static_cast<int>(machines_.size()); }
  [[nodiscard]] int width() const { return inner_->size(); }
  // The rank of another machine with which this rank exchanges its share.
  [[nodiscard]] int partner(int machine) const {
    const std::vector<int>& there = ranks_of(machine);
    return there[static_cast<std::size_t>(local_of(rank_)) % there.size()];
  }

  std::shared_ptr<host::HostCommunicator> inner_;
  int rank_;
  std::vector<Place> places_;
  std::vector<std::vector<int>> machines_;  // the ranks of each machine, ascending
  std::vector<int> local_;                  // each rank's number on its machine
  std::vector<int> order_;                  // all ranks, machine by machine
  LinkModel links_;
  std::chrono::milliseconds patience_{0};   // with silent machines
  bool is_even_ = true;                     // all machines have the same number of ranks
  std::vector<std::size_t> first_partial_;  // of each machine; the numbers go machine by machine
  std::vector<std::size_t> each_;           // 0, 1, …, machines
  std::vector<std::size_t> partials_;       // the numbers of all, in the order of their ranks
  std::vector<std::uint8_t> after_;         // how many reductions follow each
  std::vector<Subtree> here_;               // this machine's subtrees, of the numbers of its ranks
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<int> busy_;  // peers whose streams have bytes to move
  int generation_ = process_generation();

  std::atomic<bool> is_closed_{false};
  std::atomic<int> submitted_{0};
  std::atomic<int> calls_{0};  // threads in a call
  std::atomic<std::uint64_t> questions_{0};
  mutable std::mutex failure_mutex_;
  std::atomic<std::int64_t> moved_at_{0};  // when a stream last moved bytes
  std::atomic<std::int64_t> dead_at_{0};   // when the death of a rank of this machine was noticed
  std::optional<Failure> failure_;

  std::uint64_t sequence_ = 0;
  // Of the current collective.
  const CallOptions* options_ = nullptr;
  const Watcher* watcher_ = nullptr;
  Wait* wait_ = nullptr;
  std::vector<Record> records_;             // in the order of `order_`
  std::vector<CallHead> last_;              // the latest of each rank, by rank
  static constexpr std::size_t kSlots = 3;  // chunks in flight
  std::array<Buffer, kSlots> own_, parts_, results_;
  Buffer packed_, gathered_, unpacked_;
};

void NetCommunicator::inside(int grace, const auto& call) {
  const CallOptions options{options_->timeout + grace * kGrace, watcher_, nullptr,
                            &wait_->signature};
  try {
    call(options);
  } catch (const Error& error) {
    throw_inner(error, *wait_);
  }
}

}  // namespace fastdist::net
