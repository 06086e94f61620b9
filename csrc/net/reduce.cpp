// all_reduce and reduce between machines.
//
// A run of arrays goes through three steps, chunk by chunk, so that the steps of successive chunks
// overlap:
// - load: the ranks of each machine reduce the chunk, and each rank gets its share of the machine's
//   partial results (partials.cpp), of which most placements have one;
// - cross: partners exchange their shares. Between two machines, and for small arrays, each sends
//   its share to all partners and reduces what it receives. Otherwise each machine reduces one part
//   of the share and sends the result to the others, so that no byte crosses a link twice;
// - finish: the ranks of each machine gather the shares.
//
// If machines have different numbers of ranks, only their first ranks cross.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/array_list.h"
#include "host/kernels.h"
#include "net/communicator.h"

namespace fastdist::net {
namespace {

// Bytes that cross a connection at a time: enough to keep a link busy while the machine's ranks
// work on the next chunk, and few enough to stay in the caches. Not a power of two, which would put
// the pieces of all machines into the same cache sets.
constexpr std::size_t kPieceBytes = std::size_t{90} << 10;
constexpr std::size_t kMostChunkBytes = std::size_t{2} << 20;
constexpr std::size_t kLeastChunkBytes = std::size_t{64} << 10;

constexpr std::size_t divide_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

}  // namespace

struct NetCommunicator::Reduction {
  ArrayList in;
  ArrayList out;  // empty if this rank gets no result
  DType dtype;
  ReduceOp op;
  Op name;
  int root;
  DType wide;             // in which sums are computed
  DType wire;             // in which sums cross
  std::size_t count;      // elements of the run
  std::size_t shares;     // ranks of a machine that carry a share
  bool carries;           // this rank does
  bool direct;            // one crossing instead of two
  std::size_t parts;      // into which a share is divided
  std::size_t chunk = 0;  // elements per chunk
  std::size_t chunks = 0;
  // Of chunk k, in slot k % kSlots: this rank's share of the partial results in `wide`, part by
  // part, its result and, for each partner, the stream positions at which both crossings have
  // arrived (`first`, `second`) or are `sent`.
  std::array<std::byte*, kSlots> own = {}, result = {};
  std::array<std::vector<std::uint64_t>, kSlots> first = {}, second = {}, sent = {};

  [[nodiscard]] std::size_t begin(std::size_t k) const { return k * chunk; }
  [[nodiscard]] std::size_t length(std::size_t k) const {
    return std::min(count, begin(k) + chunk) - begin(k);
  }
  // Elements of each rank's share of chunk k: a multiple of `parts`.
  [[nodiscard]] std::size_t share(std::size_t k) const {
    return divide_up(length(k), shares * parts) * parts;
  }
  // Returns the memory of bytes [begin, begin + bytes) if they are in one array, else null.
  static std::byte* contiguous(const ArrayList& run, std::size_t begin, std::size_t bytes) {
    std::byte* found = nullptr;
    int pieces = 0;
    run.for_each_piece(begin, begin + bytes, [&](const ArrayList::Piece& piece) {
      found = piece.data;
      ++pieces;
    });
    return pieces == 1 ? found : nullptr;
  }
};

// Splits a list into runs of one dtype; every run's record has the hash of the whole list.
void NetCommunicator::reduce_arrays(TensorViews in, TensorViews out, ReduceOp op, Op name, int root,
                                    const CallOptions& options) {
  const Signature signature = signature_of(rooted(name, root, op), in);
  const bool is_compressed = options.whole != nullptr && options.whole->compress.has_value();
  for_each_dtype(in, out, [&](TensorViews run_in, TensorViews run_out) {
    ArrayList inputs(run_in);
    const DType dtype = run_in.empty() ? DType::kUInt8 : run_in[0].dtype;
    const DType wide = dtype_of_sums(dtype);
    const std::size_t count = inputs.bytes() / size_of(dtype);
    const std::size_t shares = is_even_ ? static_cast<std::size_t>(width()) : 1;
    const bool direct = links_.reduces_directly(machines(), static_cast<double>(inputs.bytes()));
    Reduction call{.in = std::move(inputs),
                   .out = ArrayList(run_out),
                   .dtype = dtype,
                   .op = op,
                   .name = name,
                   .root = root,
                   .wide = wide,
                   .wire = is_compressed ? dtype : wide,
                   .count = count,
                   .shares = shares,
                   .carries = static_cast<std::size_t>(local_of(rank_)) < shares,
                   .direct = direct,
                   .parts = direct ? 1 : machines_.size()};
    run(signature, options, run_in, [&] { reduce_payloads(call); }, [&] { reduce_chunks(call); });
  });
}

// Reduces the inputs that came with the records.
void NetCommunicator::reduce_payloads(const Reduction& call) {
  const bool has_result = call.name == Op::kAllReduce || rank_ == call.root;
  if (!has_result || call.count == 0) return;
  const std::size_t item = size_of(call.wide);
  const std::size_t bytes = call.count * item;
  std::vector<std::byte> wide(call.wide == call.dtype ? 0 : places_.size() * bytes);
  std::vector<const std::byte*> inputs(order_.size());
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const std::byte* payload = records_[i].payload.data();
    if (!wide.empty()) {
      host::convert(call.wide, wide.data() + i * bytes, call.dtype, payload, call.count, 1.0F);
      payload = wide.data() + i * bytes;
    }
    inputs[static_cast<std::size_t>(order_[i])] = payload;
  }
  std::vector<std::byte> sums(bytes);
  host::reduce(call.wide, call.op, sums.data(), nullptr, inputs, call.count);
  std::vector<std::byte> result(call.count * size_of(call.dtype));
  narrow(call.wide, sums.data(), call.dtype, result.data(), call.count);
  call.out.for_each_piece(0, result.size(), [&](const ArrayList::Piece& piece) {
    std::memcpy(piece.data, result.data() + piece.run_at, piece.bytes);
  });
}

void NetCommunicator::reduce_chunks(Reduction& call) {
  const std::size_t item = size_of(call.dtype);
  const std::size_t most = std::min(kMostChunkBytes, call.shares * call.parts * kPieceBytes);
  const std::size_t wanted = std::clamp(divide_up(call.count * item, 4), kLeastChunkBytes, most);
  // A multiple of the number of parts, so that only the last chunk is padded.
  const std::size_t unit = call.shares * machines_.size() * 16;
  call.chunk = divide_up(wanted / item, unit) * unit;
  call.chunks = divide_up(call.count, call.chunk);
  for (auto* positions : {&call.first, &call.second, &call.sent}) {
    for (auto& slot : *positions) slot.resize(machines_.size());
  }
  for (std::size_t k = 0; k < call.chunks + 2; ++k) {
    if (k < call.chunks) load(call, k);
    if (k >= 1 && k - 1 < call.chunks) combine(call, k - 1);
    if (k >= 2) finish(call, k - 2);
  }
  await_all_sent();
}

// Reduces chunk k within the machine, and starts to send this rank's share.
void NetCommunicator::load(Reduction& call, std::size_t k) {
  const std::size_t slot = k % kSlots;
  const std::size_t share = call.share(k);
  const std::size_t wide_item = size_of(call.wide);
  const std::size_t padded = share * (width() == 1 ? 1 : call.shares);
  await_to_partners(call.sent[slot]);  // what was sent from the slot must have left
  std::byte* const source = pack(call, k, padded);
  if (width() == 1) {
    call.own[slot] = source;
  } else {
    const bool is_one = here_.size() == 1;
    const auto ranks = static_cast<std::size_t>(width());
    call.own[slot] = own_[slot].of(*inner_, here_.size() * share * wide_item);
    std::byte* const gathered =
        is_one ? call.own[slot] : gathered_.of(*inner_, ranks * share * wide_item);
    const TensorView in{source, padded, call.wide};
    const TensorView out{gathered, is_one ? share : ranks * share, call.wide};
    inside(2, [&](const CallOptions& o) {
      if (!is_one) {
        if (is_even_) return inner_->all_to_all(in, out, {}, o);
        return inner_->gather(in, out, 0, o);
      }
      if (is_even_) return inner_->reduce_scatter(in, out, summed(call.op), o);
      inner_->reduce({&in, 1}, local_of(rank_) == 0 ? TensorViews{&out, 1} : TensorViews{},
                     summed(call.op), 0, o);
    });
    if (!is_one && call.carries) {
      reduce_here(gathered, share * wide_item, call.wide, summed(call.op), call.own[slot],
                  call.parts, share / call.parts);
    }
  }
  if (call.carries) send_share(call, k);
}

// Returns the inputs of chunk k in `wide`, with zeros up to `padded` elements.
std::byte* NetCommunicator::pack(Reduction& call, std::size_t k, std::size_t padded) {
  const std::size_t length = call.length(k);
  const std::size_t item = size_of(call.dtype);
  const std::size_t wide_item = size_of(call.wide);
  std::byte* const source = Reduction::contiguous(call.in, call.begin(k) * item, length * item);
  if (source != nullptr && call.wide == call.dtype && padded == length) return source;
  Buffer& buffer = width() == 1 ? own_[k % kSlots] : packed_;
  std::byte* const packed = buffer.of(*inner_, padded * wide_item);
  const std::size_t begin = call.begin(k) * item;
  call.in.for_each_piece(begin, begin + length * item, [&](const ArrayList::Piece& piece) {
    std::byte* const to = packed + (piece.run_at - begin) / item * wide_item;
    if (call.wide == call.dtype) {
      host::copy(to, piece.data, piece.bytes, false);
    } else {
      host::convert(call.wide, to, call.dtype, piece.data, piece.bytes / item, 1.0F);
    }
  });
  std::memset(packed + length * wide_item, 0, (padded - length) * wide_item);
  return packed;
}

// Starts the first crossing of this rank's share of chunk k. Layout of the slot's buffer: one part
// of each partial result (a whole share in direct calls), machine by machine, then this rank's
// share in `wire`, if that differs from `wide`.
void NetCommunicator::send_share(Reduction& call, std::size_t k) {
  const std::size_t slot = k % kSlots;
  const std::size_t share = call.share(k);
  const std::size_t length = call.length(k);
  const std::size_t item = size_of(call.dtype);
  const std::size_t wire_item = size_of(call.wire);
  const std::size_t part = share / call.parts;
  const std::size_t own = here_.size() * share;
  std::byte* const buffer = parts_[slot].of(
      *inner_, (all_partials() * part + (call.wire != call.wide ? own : 0)) * wire_item);
  const std::byte* outgoing = call.own[slot];
  if (call.wire != call.wide) {
    std::byte* const narrow = buffer + all_partials() * part * wire_item;
    host::convert(call.wire, narrow, call.wide, call.own[slot], own, 1.0F);
    host::convert(call.wide, call.own[slot], call.wire, narrow, own, 1.0F);  // as others see it
    outgoing = narrow;
  }
  // A machine's only rank computes into the output, if its share is the whole chunk.
  call.result[slot] =
      width() == 1 && share == length && call.wide == call.dtype && !call.out.arrays().empty()
          ? Reduction::contiguous(call.out, call.begin(k) * item, length * item)
          : nullptr;
  if (call.result[slot] == nullptr) call.result[slot] = results_[slot].of(*inner_, share * item);
  const std::size_t unit = part * wire_item;
  const std::size_t bytes = here_.size() * unit;
  cross(call, slot, call.name == Op::kAllReduce || !call.direct,
        {outgoing, call.direct ? 0 : bytes, bytes, buffer, first_partial_, unit}, call.first[slot]);
}

// Starts to exchange parts with all partners, or else to send them to the root's machine only.
void NetCommunicator::cross(Reduction& call, std::size_t slot, bool to_all, const Parts& parts,
                            std::vector<std::uint64_t>& arrived) {
  const int here = machine_of(rank_);
  for (int m = 0; m < machines(); ++m) {
    if (m == here) continue;
    const auto i = static_cast<std::size_t>(m);
    const int p = partner(m);
    if (to_all || m == machine_of(call.root)) post_send(p, parts.out + i * parts.step, parts.bytes);
    if (to_all || here == machine_of(call.root)) {
      post_receive(p, parts.in + parts.from[i] * parts.unit,
                   (parts.from[i + 1] - parts.from[i]) * parts.unit);
    }
    arrived[i] = peer(p).stream.to_receive();
    call.sent[slot][i] = peer(p).stream.to_send();
  }
  progress();
}

// Reduces what the machines have sent for chunk k. If there is a second crossing, starts it.
void NetCommunicator::combine(Reduction& call, std::size_t k) {
  if (!call.carries) return;
  const std::size_t slot = k % kSlots;
  const std::size_t part = call.share(k) / call.parts;
  const int here = machine_of(rank_);
  const std::size_t own_at = call.direct ? 0 : static_cast<std::size_t>(here) * part;
  std::byte* const result = call.result[slot];
  if (call.direct && call.name == Op::kReduce && here != machine_of(call.root)) return;

  const std::size_t wire_item = size_of(call.wire);
  std::byte* const buffer = parts_[slot].of(*inner_, 0);
  std::vector<std::byte> widened;
  if (call.wire != call.wide) widened.resize(all_partials() * part * size_of(call.wide));
  await_from_partners(call.first[slot]);
  std::vector<const std::byte*> sources;
  std::byte* received = nullptr;
  for (const std::size_t number : partials_) {
    if (number >= first_partial(here) && number < first_partial(here + 1)) {
      const std::size_t at = own_at * here_.size() + (number - first_partial(here)) * part;
      sources.push_back(call.own[slot] + at * size_of(call.wide));
      continue;
    }
    const std::size_t at = number * part;
    received = buffer + at * wire_item;
    if (call.wire != call.wide) {
      std::byte* const to = widened.data() + at * size_of(call.wide);
      host::convert(call.wide, to, call.wire, received, part, 1.0F);
      received = to;
    }
    sources.push_back(received);
  }
  // The output may be the input, from which the share is sent.
  if (call.direct && width() == 1) await_to_partners(call.sent[slot]);
  // Sums go to memory that nothing is sent from: the result, or one of the inputs.
  std::byte* const sums =
      call.wide == call.dtype ? result + own_at * size_of(call.dtype) : received;
  host::reduce(call.wide, call.op, sums, nullptr, sources, part, after_, places_.size());
  narrow(call.wide, sums, call.dtype, result + own_at * size_of(call.dtype), part);
  if (call.direct) return;

  const std::size_t bytes = part * size_of(call.dtype);
  cross(call, slot, call.name == Op::kAllReduce,
        {result + own_at * size_of(call.dtype), 0, bytes, result, each_, bytes}, call.second[slot]);
}

// Gathers the shares of chunk k within the machine.
void NetCommunicator::finish(Reduction& call, std::size_t k) {
  const std::size_t slot = k % kSlots;
  const std::size_t share = call.share(k);
  const std::size_t item = size_of(call.dtype);
  const std::size_t length = call.length(k);
  if (call.name == Op::kReduce && machine_of(rank_) != machine_of(call.root)) return;
  if (call.carries && !call.direct) await_from_partners(call.second[slot]);
  std::byte* const result =
      call.carries ? call.result[slot] : results_[slot].of(*inner_, share * item);
  const bool has_result = call.name == Op::kAllReduce || rank_ == call.root;
  std::byte* gathered = result;
  if (width() > 1) {
    const std::size_t all = share * static_cast<std::size_t>(width());
    std::byte* const direct =
        has_result && all == length
            ? Reduction::contiguous(call.out, call.begin(k) * item, all * item)
            : nullptr;
    gathered = direct != nullptr ? direct : unpacked_.of(*inner_, all * item);
    const TensorView in{result, share, call.dtype};
    const TensorView out{gathered, all, call.dtype};
    inside(2, [&](const CallOptions& o) {
      if (call.name == Op::kReduce) {
        inner_->gather(in, out, local_of(call.root), o);
      } else if (is_even_) {
        inner_->all_gather(in, out, o);
      } else {
        const TensorView whole{call.carries ? result : gathered, share, call.dtype};
        inner_->broadcast({&whole, 1}, 0, o);
      }
    });
    if (direct != nullptr) return;
    if (call.name == Op::kAllReduce && !is_even_ && call.carries) gathered = result;
  }
  if (!has_result || (width() == 1 && result != results_[slot].of(*inner_, 0))) return;
  if (width() == 1) await_to_partners(call.sent[slot]);  // sent from the arrays themselves
  const std::size_t begin = call.begin(k) * item;
  call.out.for_each_piece(begin, begin + length * item, [&](const ArrayList::Piece& piece) {
    host::copy(piece.data, gathered + (piece.run_at - begin), piece.bytes, false);
  });
}

}  // namespace fastdist::net
