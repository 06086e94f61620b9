// send and recv: a lane between two ranks for each direction.
//
// For transfer number s of a lane, both ranks announce it in their half of the lane and compare the
// announcements; if they differ, both ranks throw. The sender fills up to two buffers ahead of the
// receiver, or lets the receiver read its array directly if the array is accessible. A send returns
// after the receiver has copied the data, so that transfer s has ended when s + 1 begins.

#include <algorithm>

#include "core/failure.h"
#include "host/communicator.h"
#include "host/kernels.h"

namespace fastdist::host {

struct HostCommunicator::Transfer {
  Transfer(HostCommunicator& c, Op op, int p, TensorView view, const CallOptions& options)
      : other(p),
        array(view),
        state((op == Op::kSend ? c.sent_ : c.received_)[static_cast<std::size_t>(p)]),
        own(op == Op::kSend ? c.me().lanes[p].to : c.me().lanes[p].from),
        theirs(op == Op::kSend ? c.peer(p).lanes[c.rank_].from : c.peer(p).lanes[c.rank_].to),
        wait{&options, signature_of(rooted(op, p), {&view, 1}), &own.bell, false, {}},
        turn(state.position,
             chunk_for(view.bytes(), std::min(c.tuning_.lane_bytes, kCacheLine),
                       c.tuning_.lane_bytes),
             c.layout_.lane_ring_bytes) {
    if (options.record != nullptr) options.record->announce(wait.signature);
  }

  int other;
  TensorView array;
  LaneState& state;
  LaneHalf& own;
  LaneHalf& theirs;
  std::uint64_t location = 0;  // of the sender's array
  Wait wait;
  Turn turn;
  std::uint64_t number = ++state.transfers;

  [[nodiscard]] std::uint64_t rounds() const noexcept {
    return (array.bytes() + turn.chunk() - 1) / turn.chunk();
  }
  [[nodiscard]] Header& own_header() const noexcept { return own.headers[number & 1]; }
  [[nodiscard]] Header& their_header() const noexcept { return theirs.headers[number & 1]; }
};

void HostCommunicator::send(TensorView in, int dst, const CallOptions& options) {
  Transfer transfer(*this, Op::kSend, dst, in, options);
  if (in.bytes() > tuning_.in_place_bytes) transfer.location = locate({&in, 1});
  try {
    check_usable();
    if (transfer.location == 0) {  // the first chunk travels with the header
      fill(transfer, 0);
      transfer.own.chunks.store(progress(transfer.number, 1), std::memory_order_relaxed);
    }
    open(transfer);
    send_chunks(transfer);
  } catch (...) {
    await_access_end(dst, transfer.theirs.accessing, transfer.number);
    throw;
  }
}

void HostCommunicator::recv(TensorView out, int src, const CallOptions& options) {
  Transfer transfer(*this, Op::kRecv, src, out, options);
  open(transfer);
  receive_chunks(transfer);
}

// Returns where `src` announces the next transfer to this rank.
Header& HostCommunicator::next_header(int src) noexcept {
  const std::uint64_t number = received_[static_cast<std::size_t>(src)].transfers + 1;
  return peer(src).lanes[rank_].to.headers[number & 1];
}

Message HostCommunicator::message_in(const Header& header) noexcept {
  const Signature theirs = signature_in(header);
  return {theirs.dtype, theirs.count, theirs.order, theirs.list};
}

std::optional<Message> HostCommunicator::find_message(int src) {
  check_usable();
  const Header& header = next_header(src);
  const std::uint64_t number = received_[static_cast<std::size_t>(src)].transfers + 1;
  if (header.sequence.load(std::memory_order_acquire) < number) return std::nullopt;
  return message_in(header);
}

Message HostCommunicator::await_message(int src, TensorView out, const CallOptions& options) {
  const std::uint64_t number = received_[static_cast<std::size_t>(src)].transfers + 1;
  const Counter& announced = next_header(src).sequence;
  if (announced.load(std::memory_order_acquire) < number) {
    check_usable();
    const Signature call = signature_of(rooted(Op::kRecv, src), {&out, 1});
    if (options.record != nullptr) options.record->announce(call);
    Wait wait{&options, call, &me().lanes[src].from.bell, false, {}};
    await_slowly(src, announced, number, wait);
  }
  return message_in(next_header(src));
}

void HostCommunicator::publish(Transfer& transfer, Counter& counter, std::uint64_t value) noexcept {
  counter.exchange(value, std::memory_order_seq_cst);
  transfer.theirs.bell.ring_if_waiting(rank_);
}

void HostCommunicator::await(Transfer& transfer, const Counter& counter, std::uint64_t value) {
  if (counter.load(std::memory_order_acquire) >= value) return;
  await_slowly(transfer.other, counter, value, transfer.wait);
}

void HostCommunicator::open(Transfer& transfer) {
  check_usable();
  const bool small = travels_with_header(transfer.array.bytes());
  if (!small || machine_->one_process()) transfer.wait.options->caller->may_block();
  Header& header = transfer.own_header();
  header.signature.store(transfer.wait.signature.packed(), std::memory_order_relaxed);
  header.count.store(transfer.wait.signature.count, std::memory_order_relaxed);
  header.list.store(transfer.wait.options->tag, std::memory_order_relaxed);
  header.input.store(transfer.location, std::memory_order_relaxed);
  publish(transfer, header.sequence, transfer.number);
  await(transfer, transfer.their_header().sequence, transfer.number);
  compare(transfer);
}

// Both ranks detect a mismatch; each tells the other where it made its call.
void HostCommunicator::compare(Transfer& transfer) {
  const Header& theirs = transfer.their_header();
  const Signature other = unpack_signature(theirs.signature.load(std::memory_order_relaxed),
                                           theirs.count.load(std::memory_order_relaxed), 0);
  const Signature& own = transfer.wait.signature;
  if (other.dtype == own.dtype && other.count == own.count && other.order == own.order) return;
  transfer.own.site.write(transfer.wait.options->caller->location());
  publish(transfer, transfer.own.site.call, transfer.number);
  await(transfer, transfer.theirs.site.call, transfer.number);
  Signature shown = other;
  if (!labels_.empty()) shown.root = static_cast<std::int16_t>(label(rank_));
  throw transfer_mismatch_of(transfer.number, label(rank_),
                             {transfer.wait.shown(), transfer.own.site.text.data()},
                             label(transfer.other), {shown, transfer.theirs.site.text.data()});
}

void HostCommunicator::fill(Transfer& transfer, std::uint64_t round) {
  const std::size_t chunk = transfer.turn.chunk();
  const std::size_t at = std::min(transfer.array.bytes(), round * chunk);
  transfer.state.copy(
      me().block + layout_.lane_ring(transfer.other) + transfer.turn.part(round) * chunk,
      transfer.array.data + at, std::min(chunk, transfer.array.bytes() - at));
}

void HostCommunicator::send_chunks(Transfer& transfer) {
  const std::uint64_t number = transfer.number;
  if (transfer.location == 0) {
    const std::uint64_t rounds = transfer.rounds();
    for (std::uint64_t k = 1; k < rounds; ++k) {
      if (k >= 2) await(transfer, transfer.theirs.chunks, progress(number, k - 1));
      fill(transfer, k);
      publish(transfer, transfer.own.chunks, progress(number, k + 1));
    }
    transfer.state.position = transfer.turn.end(rounds);
  }
  await(transfer, transfer.theirs.chunks, progress(number, kAllRounds));
}

void HostCommunicator::receive_chunks(Transfer& transfer) {
  const std::size_t bytes = transfer.array.bytes();
  const std::uint64_t number = transfer.number;
  const bool stream = bytes >= tuning_.stream_bytes;
  const std::uint64_t location = transfer.their_header().input.load(std::memory_order_relaxed);
  if (location != 0) {  // the same protocol as `begin_access`
    Counter& accessing = transfer.own.accessing;
    const auto check_sender = [&] {
      if (state_of(transfer.other, std::memory_order_seq_cst) == RankState::kActive) return;
      accessing.store(0, std::memory_order_release);
      throw_peer_failure(transfer.other, transfer.wait);
    };
    accessing.store(number, std::memory_order_seq_cst);
    check_sender();
    copy(transfer.array.data, data_of(transfer.other, location, 0), bytes, stream);
    check_sender();
    accessing.exchange(0, std::memory_order_seq_cst);
  } else {
    const std::size_t chunk = transfer.turn.chunk();
    const std::byte* ring = peer(transfer.other).block + layout_.lane_ring(rank_);
    const std::uint64_t rounds = transfer.rounds();
    for (std::uint64_t k = 0; k < rounds; ++k) {
      await(transfer, transfer.theirs.chunks, progress(number, k + 1));
      const std::size_t at = k * chunk;
      copy(transfer.array.data + at, ring + transfer.turn.part(k) * chunk,
           std::min(chunk, bytes - at), stream);
      publish(transfer, transfer.own.chunks, progress(number, k + 1));
    }
    transfer.state.position = transfer.turn.end(rounds);
  }
  publish(transfer, transfer.own.chunks, progress(number, kAllRounds));
}

}  // namespace fastdist::host
