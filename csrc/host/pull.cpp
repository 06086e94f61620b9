// broadcast, all_gather, gather, scatter, all_to_all, barrier: every rank announces which range of
// its input each peer may read, and reads its own ranges of the peers' inputs.
//
// A range is read from the payload in the header if the input is small, from the peer's array if
// that is accessible, and otherwise through the peer's staging area in rounds: the owner exposes
// round k + 1 while the readers copy round k.

#include <algorithm>

#include "core/array_list.h"
#include "host/communicator.h"
#include "host/kernels.h"

namespace fastdist::host {
// The ranges are in `outgoing_` (of the source, one per reader), `incoming_` (of the target, one
// per owner) and `source_offsets_` (where incoming_[p] begins in p's source).
struct HostCommunicator::PullPlan {
  ArrayList source;
  ArrayList target;
  bool shared;   // every reader reads the same range, which is exposed once
  bool aligned;  // incoming_ has the same offsets in source and target (lists, in place)
};

// A call's bytes that go through staging areas, in rounds: a rank exposes its chunk of a round
// before it consumes the peers' chunks of the round before.
class HostCommunicator::StagedPull {
 public:
  StagedPull(HostCommunicator& communicator, const PullPlan& plan, bool stream)
      : comm_(communicator),
        plan_(plan),
        stream_(stream),
        parts_(plan.shared ? 1 : static_cast<std::size_t>(comm_.size())),
        own_chunk_(chunk_of(plan.source.bytes())),
        own_turn_(turn_with(own_chunk_)) {}

  void run(bool stages_input) {
    std::size_t give_rounds = 0;
    std::size_t take_rounds = 0;
    for (int p = 0; p < comm_.size(); ++p) {
      if (stages_input) {
        give_rounds = std::max(give_rounds, (outgoing(p).size() + own_chunk_ - 1) / own_chunk_);
      }
      if (is_staged_from(p)) {
        const std::size_t chunk = chunk_from(p);
        take_rounds = std::max(take_rounds, (incoming(p).size() + chunk - 1) / chunk);
      }
    }
    for (std::size_t step = 0; step < std::max(give_rounds, take_rounds + 1); ++step) {
      if (step < give_rounds) expose(step);
      if (step >= 1 && step - 1 < take_rounds) consume(step - 1);
    }
  }

 private:
  void expose(std::size_t round) {
    std::byte* input = comm_.input_of(comm_.rank_, own_turn_, round);
    for (int p = 0; p < comm_.size() && round >= 2; ++p) {
      if (p == comm_.rank_ || part(outgoing(p), round - 2, own_chunk_).size() == 0) continue;
      comm_.await(p, comm_.peer(p).control->consumed, progress(comm_.sequence_, round - 1));
    }
    for (int p = 0; p < comm_.size(); ++p) {
      const Range give = part(outgoing(p), round, own_chunk_);
      if (give.size() == 0 || p == comm_.rank_) continue;
      std::byte* staged = input + (plan_.shared ? 0 : static_cast<std::size_t>(p) * own_chunk_);
      plan_.source.for_each_piece(give.begin, give.end, [&](const ArrayList::Piece& piece) {
        comm_.copy_to_peers_(staged + (piece.run_at - give.begin), piece.data, piece.bytes);
      });
      if (plan_.shared) break;
    }
    const Range& whole = incoming(comm_.rank_);
    const Range own = part(whole, round, own_chunk_);
    if (own.size() != 0) {
      copy(plan_.target.arrays()[0].data + own.begin,
           plan_.source.arrays()[0].data + outgoing(comm_.rank_).begin + (own.begin - whole.begin),
           own.size(), stream_);
    }
    comm_.publish(comm_.me().control->exposed, progress(comm_.sequence_, round + 1));
  }

  void consume(std::size_t round) {
    for (int p = 0; p < comm_.size(); ++p) {
      if (!is_staged_from(p)) continue;
      const std::size_t chunk = chunk_from(p);
      const Range take = part(incoming(p), round, chunk);
      if (take.size() == 0) continue;
      comm_.await(p, comm_.peer(p).control->exposed, progress(comm_.sequence_, round + 1));
      const std::byte* staged = comm_.input_of(p, turn_with(chunk), round) +
                                (plan_.shared ? 0 : static_cast<std::size_t>(comm_.rank_) * chunk);
      plan_.target.for_each_piece(take.begin, take.end, [&](const ArrayList::Piece& piece) {
        copy(piece.data, staged + (piece.run_at - take.begin), piece.bytes, stream_);
      });
    }
    comm_.publish(comm_.me().control->consumed, progress(comm_.sequence_, round + 1));
  }

  static Range part(const Range& whole, std::size_t round, std::size_t chunk) {
    const std::size_t begin = std::min(whole.end, whole.begin + round * chunk);
    return Range{begin, std::min(whole.end, begin + chunk)};
  }

  // Bytes that a rank exposes per round to each reader.
  [[nodiscard]] std::size_t chunk_of(std::size_t source_bytes) const {
    const std::size_t chunk =
        chunk_for(source_bytes, comm_.layout_.least_chunk(), comm_.tuning_.chunk_bytes);
    return std::max(kCacheLine, chunk / parts_ / kCacheLine * kCacheLine);
  }

  [[nodiscard]] std::size_t chunk_from(int p) const {
    return chunk_of(comm_.header_of(p).output.load(std::memory_order_relaxed));
  }

  [[nodiscard]] Turn turn_with(std::size_t chunk) const {
    return Turn(comm_.position_, chunk * parts_, comm_.layout_.ring_bytes);
  }

  [[nodiscard]] bool is_staged_from(int p) const {
    return p != comm_.rank_ && comm_.stages_input_of(p);
  }

  [[nodiscard]] const Range& outgoing(int p) const {
    return comm_.outgoing_[static_cast<std::size_t>(p)];
  }

  [[nodiscard]] const Range& incoming(int p) const {
    return comm_.incoming_[static_cast<std::size_t>(p)];
  }

  HostCommunicator& comm_;
  const PullPlan& plan_;
  bool stream_;
  std::size_t parts_;
  std::size_t own_chunk_;
  Turn own_turn_;
};

void HostCommunicator::pull(const PullPlan& plan, const Signature& signature,
                            const CallOptions& options) {
  Header& header = announce(signature, options);
  const std::size_t bytes = plan.source.bytes();
  bool has_readers = false;
  for (int p = 0; p < size(); ++p) {
    has_readers |= p != rank_ && outgoing_[static_cast<std::size_t>(p)].size() != 0;
  }
  std::uint64_t location = 0;
  const bool small = travels_with_header(bytes);
  if (!small || !travels_with_header(plan.target.bytes())) options.caller->may_block();
  if (has_readers) {
    if (bytes > tuning_.in_place_bytes) location = locate(plan.source.arrays());
    header.input.store(location, std::memory_order_relaxed);
    header.output.store(bytes, std::memory_order_relaxed);
    if (location == 0 && small) {
      std::byte* payload = payload_of(rank_, bytes);
      plan.source.for_each_piece(0, bytes, [&](const ArrayList::Piece& piece) {
        copy_to_peers_(payload + piece.run_at, piece.data, piece.bytes);
      });
    }
  }
  try {
    exchange(header);
    pull_announced(plan, has_readers && location == 0 && !small);
    if (location == 0) return;
    for (int p = 0; p < size(); ++p) {
      if (p == rank_ || outgoing_[static_cast<std::size_t>(p)].size() == 0) continue;
      await(p, peer(p).control->consumed, progress(sequence_, kAllRounds));
    }
  } catch (...) {
    await_accesses();
    throw;
  }
}

void HostCommunicator::pull_announced(const PullPlan& plan, bool stages_input) {
  // A quarter of a reduction's limit: a reduction reads the lines of its results before writing
  // them.
  const bool stream = plan.target.bytes() >= tuning_.stream_bytes / 4;
  bool any_staged = stages_input;
  bool accesses = false;
  std::size_t most_staged = 0;
  for (int p = 0; p < size(); ++p) {
    const auto q = static_cast<std::size_t>(p);
    const Range take = incoming_[q];
    const Header& theirs = header_of(p);
    const std::uint64_t their_input = theirs.input.load(std::memory_order_relaxed);
    const std::size_t their_bytes = theirs.output.load(std::memory_order_relaxed);
    const bool is_staged = stages_input_of(p);
    if (is_staged) most_staged = std::max(most_staged, their_bytes);
    if (take.size() == 0) continue;
    if (p == rank_) {
      if (stages_input) continue;  // copied round by round, while the data is in the cache
      copy(plan.target.arrays()[0].data + take.begin,
           plan.source.arrays()[0].data + outgoing_[q].begin, take.size(), stream);
      continue;
    }
    if (is_staged) {
      any_staged = true;
      continue;
    }
    if (their_input != 0) {
      if (!accesses) begin_access();
      accesses = true;
      check_active(p);
    }
    plan.target.for_each_piece(take.begin, take.end, [&](const ArrayList::Piece& piece) {
      const std::size_t from = source_offsets_[q] + (piece.run_at - take.begin);
      const std::byte* src = their_input == 0 ? payload_of(p, their_bytes) + from
                             : plan.aligned   ? data_of(p, their_input, piece.array) + piece.at
                                              : data_of(p, their_input, 0) + from;
      copy(piece.data, src, piece.bytes, stream);
    });
    if (their_input != 0) check_active(p);
  }
  if (accesses) end_access();
  if (any_staged) StagedPull(*this, plan, stream).run(stages_input);
  if (most_staged != 0) {  // from the headers, and so the same on all ranks
    position_ = round_up(position_ + most_staged, kCacheLine) % layout_.ring_bytes;
  }
  publish(me().control->consumed, progress(sequence_, kAllRounds));
}

bool HostCommunicator::stages_input_of(int p) noexcept {
  const Header& theirs = header_of(p);
  return theirs.input.load(std::memory_order_relaxed) == 0 &&
         !travels_with_header(theirs.output.load(std::memory_order_relaxed));
}

void HostCommunicator::broadcast(TensorViews inout, int root, const CallOptions& options) {
  const ArrayList run(inout);
  const Range whole{0, run.bytes()};
  for (int p = 0; p < size(); ++p) {
    const auto q = static_cast<std::size_t>(p);
    outgoing_[q] = rank_ == root && p != root ? whole : Range{};
    incoming_[q] = rank_ != root && p == root ? whole : Range{};
    source_offsets_[q] = 0;
  }
  pull({run, run, true, true}, signature_of(rooted(Op::kBroadcast, root), inout), options);
}

void HostCommunicator::all_gather(TensorView in, TensorView out, const CallOptions& options) {
  const std::size_t bytes = in.bytes();
  for (std::size_t q = 0; q < outgoing_.size(); ++q) {
    outgoing_[q] = {0, bytes};
    incoming_[q] = {q * bytes, (q + 1) * bytes};
    source_offsets_[q] = 0;
  }
  pull({ArrayList({&in, 1}), ArrayList({&out, 1}), true, false},
       signature_of({.op = Op::kAllGather}, {&in, 1}), options);
}

void HostCommunicator::gather(TensorView in, TensorView out, int root, const CallOptions& options) {
  const std::size_t bytes = in.bytes();
  for (std::size_t q = 0; q < outgoing_.size(); ++q) {
    outgoing_[q] = q == static_cast<std::size_t>(root) ? Range{0, bytes} : Range{};
    incoming_[q] = rank_ == root ? Range{q * bytes, (q + 1) * bytes} : Range{};
    source_offsets_[q] = 0;
  }
  pull({ArrayList({&in, 1}), ArrayList({&out, 1}), true, false},
       signature_of(rooted(Op::kGather, root), {&in, 1}), options);
}

void HostCommunicator::scatter(TensorView in, TensorView out, int root,
                               const CallOptions& options) {
  const std::size_t bytes = out.bytes();
  for (std::size_t q = 0; q < outgoing_.size(); ++q) {
    outgoing_[q] = rank_ == root ? Range{q * bytes, (q + 1) * bytes} : Range{};
    incoming_[q] = q == static_cast<std::size_t>(root) ? Range{0, bytes} : Range{};
    source_offsets_[q] = bytes * static_cast<std::size_t>(rank_);
  }
  pull({ArrayList({&in, 1}), ArrayList({&out, 1}), false, false},
       signature_of(rooted(Op::kScatter, root), {&out, 1}), options);
}

void HostCommunicator::all_to_all(TensorView in, TensorView out,
                                  std::span<const std::size_t> counts, const CallOptions& options) {
  const auto n = static_cast<std::size_t>(size());
  const auto r = static_cast<std::size_t>(rank_);
  const std::size_t item = size_of(in.dtype);
  const auto bytes_between = [&](std::size_t from, std::size_t to) {
    return counts.empty() ? in.bytes() / n : counts[from * n + to] * item;
  };
  std::size_t give_at = 0;
  std::size_t take_at = 0;
  for (std::size_t q = 0; q < n; ++q) {
    outgoing_[q] = {give_at, give_at + bytes_between(r, q)};
    incoming_[q] = {take_at, take_at + bytes_between(q, r)};
    give_at = outgoing_[q].end;
    take_at = incoming_[q].end;
    source_offsets_[q] = 0;
    for (std::size_t before = 0; before < r; ++before)
      source_offsets_[q] += bytes_between(q, before);
  }
  pull({ArrayList({&in, 1}), ArrayList({&out, 1}), false, false},
       all_to_all_signature({&in, 1}, counts), options);
}

void HostCommunicator::barrier(const CallOptions& options) {
  std::fill(outgoing_.begin(), outgoing_.end(), Range{});
  std::fill(incoming_.begin(), incoming_.end(), Range{});
  pull({ArrayList({}), ArrayList({}), true, true}, Signature{.op = Op::kBarrier}, options);
}

}  // namespace fastdist::host
