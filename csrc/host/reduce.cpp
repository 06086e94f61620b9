// all_reduce, reduce and reduce_scatter: one algorithm, with different destinations of the results.
//
// Three methods, chosen by size and by location of the arrays:
// - payloads: the inputs travel with the headers, and every rank reduces the part it needs. One
//   exchange; each rank reads n·N bytes.
// - in place: every rank can access every array (threads, or `comm.empty`). Each rank reduces its
//   slice of all inputs and writes the result into all outputs: the n·N bytes are read once and
//   written once.
// - staged: the inputs go through the staging area in rounds of one chunk. In each round a rank
//   exposes its chunk, reduces its slice of all chunks, and gathers the other slices' results. The
//   three steps of successive rounds overlap, the staging area stays in the caches, and memory
//   traffic is that of the arrays alone.
//
// One rank reduces each element, so every rank and every method gives the same bits.

#include <algorithm>

#include "core/array_list.h"
#include "host/communicator.h"
#include "host/kernels.h"

namespace fastdist::host {
namespace {

// How many rounds reducing and gathering lag behind exposing.
constexpr std::size_t kReduceLag = 1;
constexpr std::size_t kGatherLag = 2;
// While results are gathered from caches, memory is idle: per so many bytes, as many of the input
// are fetched.
constexpr std::size_t kFetched = 512;

void fetch(const std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(data + i, 0, 2);
}

}  // namespace

struct HostCommunicator::ReduceCall {
  ArrayList in;
  ArrayList out;  // empty if this rank gets no results
  DType dtype;
  ReduceOp op;
  Op name;
  int root;
  bool stream;            // results bypass the caches
  bool fetch;             // the input is not in the caches
  std::size_t chunk = 0;  // bytes per round, of the run or of each rank's block of the run
  std::size_t rounds = 0;

  [[nodiscard]] bool gathers(int rank) const noexcept {
    return name == Op::kAllReduce || (name == Op::kReduce && rank == root);
  }
  // True if each rank gets its own slice only.
  [[nodiscard]] bool scatters() const noexcept { return name == Op::kReduceScatter; }
};

// Splits a list into runs of one dtype; every run's header has the hash of the whole list.
void HostCommunicator::reduce_arrays(TensorViews in, TensorViews out, ReduceOp op, Op name,
                                     int root, const CallOptions& options) {
  const Signature signature = signature_of(rooted(name, root, op), in);
  for_each_dtype(in, out, [&](TensorViews run_in, TensorViews run_out) {
    ArrayList inputs(run_in);
    const std::size_t bytes = inputs.bytes();
    // The lines of an array that is reduced in place are in the caches when they are written.
    const bool has_read_target =
        !run_in.empty() && !run_out.empty() && run_in[0].data == run_out[0].data;
    ReduceCall call{.in = std::move(inputs),
                    .out = ArrayList(run_out),
                    .dtype = run_in.empty() ? DType::kUInt8 : run_in[0].dtype,
                    .op = op,
                    .name = name,
                    .root = root,
                    .stream = bytes >= tuning_.stream_bytes && !has_read_target,
                    .fetch = bytes >= tuning_.stream_bytes / 4};
    reduce_run(call, signature, options);
  });
}

void HostCommunicator::reduce_run(ReduceCall& call, const Signature& signature,
                                  const CallOptions& options) {
  Header& header = announce(signature, options);
  const std::size_t bytes = call.in.bytes();
  const std::uint64_t input = bytes > tuning_.in_place_bytes ? locate(call.in.arrays()) : 0;
  const bool small = travels_with_header(bytes);
  if (!small) options.caller->may_block();
  if (input != 0) {
    header.input.store(input, std::memory_order_relaxed);
    const bool reachable_output = !call.out.arrays().empty();
    header.output.store(reachable_output ? locate(call.out.arrays()) : 0,
                        std::memory_order_relaxed);
  } else if (small) {
    std::byte* payload = payload_of(rank_, bytes);
    call.in.for_each_piece(0, bytes, [&](const ArrayList::Piece& piece) {
      copy_to_peers_(payload + piece.run_at, piece.data, piece.bytes);
    });
  }
  try {
    exchange(header);
    reduce_announced(call, small);
  } catch (...) {
    await_accesses();
    throw;
  }
}

void HostCommunicator::reduce_announced(ReduceCall& call, bool small) {
  bool all_reachable = true;
  bool none_reachable = true;
  for (int p = 0; p < size(); ++p) {
    const Header& theirs = header_of(p);
    const bool needs_output = call.gathers(p);
    const bool has_input = theirs.input.load(std::memory_order_relaxed) != 0;
    const bool has_output = theirs.output.load(std::memory_order_relaxed) != 0;
    all_reachable &= has_input && (has_output || !needs_output);
    none_reachable &= !has_input;
  }
  if (none_reachable && small) {
    reduce_payloads(call);
  } else if (all_reachable) {
    reduce_in_place(call);
  } else {
    reduce_staged(call);
  }
}

void HostCommunicator::reduce_payloads(const ReduceCall& call) {
  const std::size_t bytes = call.in.bytes();
  const std::size_t item = size_of(call.dtype);
  std::size_t begin = 0;
  std::size_t end = bytes;
  if (call.scatters()) {
    const std::size_t block = bytes / static_cast<std::size_t>(size());
    begin = block * static_cast<std::size_t>(rank_);
    end = begin + block;
  } else if (!call.gathers(rank_)) {
    return;
  }
  call.out.for_each_piece(0, end - begin, [&](const ArrayList::Piece& piece) {
    for (int p = 0; p < size(); ++p) {
      sources_[static_cast<std::size_t>(p)] = payload_of(p, bytes) + begin + piece.run_at;
    }
    host::reduce(call.dtype, call.op, piece.data, nullptr, sources_, piece.bytes / item);
  });
}

void HostCommunicator::reduce_in_place(const ReduceCall& call) {
  const std::size_t bytes = call.in.bytes();
  const std::size_t item = size_of(call.dtype);
  const auto n = static_cast<std::size_t>(size());
  const auto r = static_cast<std::size_t>(rank_);
  const bool own = call.scatters();
  const std::size_t share = own ? bytes / n : round_up((bytes + n - 1) / n, kCacheLine);
  const std::size_t begin = std::min(bytes, r * share);
  const std::size_t end = std::min(bytes, begin + share);
  std::byte* scratch = scratch_.data();
  begin_access();
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) check_active(p);
  }

  const auto reduce_block = [&](std::size_t i, std::size_t at, std::size_t run_at,
                                std::size_t length) {
    std::size_t n_targets = 0;
    for (int p = 0; p < size(); ++p) {
      const Header& theirs = header_of(p);
      sources_[static_cast<std::size_t>(p)] =
          data_of(p, theirs.input.load(std::memory_order_relaxed), i) + at;
      if (own || !call.gathers(p)) continue;
      targets_[n_targets++] = data_of(p, theirs.output.load(std::memory_order_relaxed), i) + at;
    }
    if (own) targets_[n_targets++] = call.out.arrays()[0].data + (run_at - begin);
    if (call.stream) {
      host::reduce(call.dtype, call.op, scratch, nullptr, sources_, length / item);
      for (std::size_t t = 0; t < n_targets; ++t) copy(targets_[t], scratch, length, true);
    } else if (n_targets != 0) {
      host::reduce(call.dtype, call.op, targets_[0], n_targets > 1 ? targets_[1] : nullptr,
                   sources_, length / item);
      for (std::size_t t = 2; t < n_targets; ++t) copy(targets_[t], targets_[0], length, false);
    }
  };
  call.in.for_each_piece(begin, end, [&](const ArrayList::Piece& piece) {
    for (std::size_t done = 0; done < piece.bytes; done += kBlock) {
      reduce_block(piece.array, piece.at + done, piece.run_at + done,
                   std::min(kBlock, piece.bytes - done));
    }
  });
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) check_active(p);
  }
  end_access();

  // Peers read this rank's input and write its output until they have published this.
  publish(me().control->consumed, progress(sequence_, kAllRounds));
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) await(p, peer(p).control->consumed, progress(sequence_, kAllRounds));
  }
}

HostCommunicator::Slice HostCommunicator::slice(const ReduceCall& call, std::size_t round,
                                                int owner) const noexcept {
  const std::size_t bytes = call.in.bytes();
  const auto n = static_cast<std::size_t>(size());
  const auto d = static_cast<std::size_t>(owner);
  if (call.scatters()) {
    const std::size_t block = bytes / n;
    const std::size_t begin = std::min(block, round * call.chunk);
    const std::size_t end = std::min(block, begin + call.chunk);
    return {{d * block + begin, d * block + end}, d * call.chunk};
  }
  const std::size_t start = round * call.chunk;
  const std::size_t length = std::min(call.chunk, bytes - start);
  const std::size_t share = round_up((length + n - 1) / n, kCacheLine);
  const std::size_t begin = std::min(length, d * share);
  const std::size_t end = std::min(length, begin + share);
  return {{start + begin, start + end}, begin};
}

// Where ranks take turns on the cores, a step of a round takes as long as the turns of all of them,
// and nothing is gained by overlapping steps: rounds are as few as the rings permit. All ranks have
// published their cores by now, so that they come to the same result.
std::size_t HostCommunicator::chunk_of_round(std::size_t bytes) noexcept {
  const std::size_t least = layout_.least_chunk();
  if (!is_crowded()) return chunk_for(bytes, least, tuning_.chunk_bytes);
  return std::clamp(round_up(bytes, kCacheLine), least, layout_.ring_bytes / 2);
}

// At most two rounds are under way: `expose_round` waits until the peers have reduced the round
// before the last one (consumed), `reduce_round` until they have gathered its results.
void HostCommunicator::reduce_staged(ReduceCall& call) {
  const bool own = call.scatters();
  const std::size_t parts = own ? static_cast<std::size_t>(size()) : 1;
  const std::size_t bytes = call.in.bytes();
  const std::size_t whole_chunk = chunk_of_round(bytes);
  call.chunk =
      own ? std::max(kCacheLine, whole_chunk / parts / kCacheLine * kCacheLine) : whole_chunk;
  call.rounds = (bytes / parts + call.chunk - 1) / call.chunk;
  const Turn turn(position_, call.chunk * parts, layout_.ring_bytes);
  position_ = turn.end(call.rounds);
  Control& control = *me().control;
  for (std::size_t step = 0; step < call.rounds + kGatherLag; ++step) {
    if (step < call.rounds) {
      expose_round(call, turn, step);
      publish(control.exposed, progress(sequence_, step + 1));
    }
    if (step >= kReduceLag && step - kReduceLag < call.rounds) {
      reduce_round(call, turn, step - kReduceLag);
      publish(control.consumed, progress(sequence_, step - kReduceLag + 1));
    }
    if (step >= kGatherLag && call.gathers(rank_)) {
      gather_round(call, turn, step - kGatherLag);
      publish(control.gathered, progress(sequence_, step - kGatherLag + 1));
    }
  }
}

void HostCommunicator::expose_round(const ReduceCall& call, const Turn& turn, std::size_t round) {
  std::byte* input = input_of(rank_, turn, round);
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    if (round >= 2) await(p, peer(p).control->consumed, progress(sequence_, round - 1));
    const Slice s = slice(call, round, p);
    call.in.for_each_piece(s.run.begin, s.run.end, [&](const ArrayList::Piece& piece) {
      copy_to_peers_(input + s.staged + (piece.run_at - s.run.begin), piece.data, piece.bytes);
    });
  }
}

void HostCommunicator::reduce_round(const ReduceCall& call, const Turn& turn, std::size_t round) {
  const std::size_t item = size_of(call.dtype);
  const Slice s = slice(call, round, rank_);
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    await(p, peer(p).control->exposed, progress(sequence_, round + 1));
    if (round >= 2 && call.gathers(p)) {
      await(p, peer(p).control->gathered, progress(sequence_, round - 1));
    }
  }
  constexpr std::size_t kCopied = kBlock / 2;  // which the first-level cache then still holds
  std::byte* result = result_of(rank_, turn, round);
  std::byte* scratch = scratch_.data();
  const bool keeps = call.scatters() || call.gathers(rank_);
  const bool copies = copy_to_peers_.past_caches();
  const bool exposes =
      call.name == Op::kAllReduce || (call.name == Op::kReduce && rank_ != call.root);
  const std::size_t block_begin =
      call.scatters()
          ? call.in.bytes() / static_cast<std::size_t>(size()) * static_cast<std::size_t>(rank_)
          : 0;
  call.in.for_each_piece(s.run.begin, s.run.end, [&](const ArrayList::Piece& piece) {
    for (std::size_t done = 0; done < piece.bytes; done += kCopied) {
      const std::size_t part = std::min(kCopied, piece.bytes - done);
      const std::size_t offset = piece.run_at + done - s.run.begin;
      for (int p = 0; p < size(); ++p) {
        sources_[static_cast<std::size_t>(p)] =
            p == rank_ ? piece.data + done : input_of(p, turn, round) + s.staged + offset;
      }
      const std::size_t out_at = (call.scatters() ? piece.run_at - block_begin : piece.at) + done;
      std::byte* out = keeps ? call.out.arrays()[piece.array].data + out_at : nullptr;
      std::byte* shared = exposes && !copies ? result + offset : nullptr;
      std::byte* sum = keeps && !call.stream ? out : keeps || copies ? scratch : shared;
      std::byte* also = sum == shared ? nullptr : shared;
      host::reduce(call.dtype, call.op, sum, also, sources_, part / item);
      if (keeps && call.stream) copy(out, sum, part, true);
      if (exposes && copies) copy_to_peers_(result + offset, sum, part);
    }
  });
}

void HostCommunicator::gather_round(const ReduceCall& call, const Turn& turn, std::size_t round) {
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) continue;
    await(p, peer(p).control->consumed, progress(sequence_, round + 1));
    const Slice s = slice(call, round, p);
    const std::byte* result = result_of(p, turn, round);
    const std::size_t ahead = (kGatherLag + 1) * call.chunk;  // `expose_round` comes next
    call.out.for_each_piece(s.run.begin, s.run.end, [&](const ArrayList::Piece& piece) {
      const std::byte* from = result + (piece.run_at - s.run.begin);
      if (!call.fetch) return copy(piece.data, from, piece.bytes, call.stream);
      const TensorView& in = call.in.arrays()[piece.array];
      for (std::size_t done = 0; done < piece.bytes; done += kFetched) {
        const std::size_t part = std::min(kFetched, piece.bytes - done);
        const std::size_t next = piece.at + done + ahead;
        if (next + part <= in.bytes()) fetch(in.data + next, part);
        copy(piece.data + done, from + done, part, call.stream);
      }
    });
  }
}

}  // namespace fastdist::host
