// broadcast, all_gather, gather, scatter, all_to_all and barrier between machines.

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/array_list.h"
#include "host/kernels.h"
#include "net/communicator.h"

namespace fastdist::net {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
constexpr std::size_t kLine = 64;

TensorView bytes_at(std::byte* data, std::size_t bytes) { return {data, bytes, DType::kUInt8, 0}; }

std::vector<TensorView> pieces_of(const ArrayList& run, std::size_t begin, std::size_t end) {
  std::vector<TensorView> found;
  run.for_each_piece(begin, end, [&](const ArrayList::Piece& piece) {
    found.push_back(bytes_at(piece.data, piece.bytes));
  });
  return found;
}

}  // namespace

void NetCommunicator::barrier(const CallOptions& options) {
  run(Signature{.op = Op::kBarrier}, options, {}, [] {}, nullptr);
}

void NetCommunicator::broadcast(TensorViews inout, int root, const CallOptions& options) {
  const auto copy_payload = [&] {
    if (rank_ == root) return;
    const auto at = std::find(order_.begin(), order_.end(), root) - order_.begin();
    const std::byte* payload = records_[static_cast<std::size_t>(at)].payload.data();
    for (const TensorView& view : inout) {
      if (view.bytes() != 0) std::memcpy(view.data, payload, view.bytes());
      payload += view.bytes();
    }
  };
  run(signature_of(rooted(Op::kBroadcast, root), inout), options, inout, copy_payload,
      [&] { broadcast_chunks(inout, root); });
}

// The root's machine distributes each chunk among its ranks. Each of them sends a slice to its
// partners on other machines, which distribute the slices there.
void NetCommunicator::broadcast_chunks(TensorViews inout, int root) {
  const ArrayList whole(inout);
  const int n = machines();
  const int here = machine_of(rank_);
  const int place = (here - machine_of(root) + n) % n;  // in the chain
  const bool chain = links_.broadcasts_in_chain(n, static_cast<double>(whole.bytes()));
  const auto shares = static_cast<std::size_t>(is_even_ ? width() : 1);
  const auto share = static_cast<std::size_t>(local_of(rank_));
  const std::size_t chunks = (whole.bytes() + kChunkBytes - 1) / kChunkBytes;
  // Returns where slice `s` of chunk `k` begins.
  const auto start = [&](std::size_t k, std::size_t s) {
    const std::size_t begin = k * kChunkBytes;
    const std::size_t end = std::min(whole.bytes(), begin + kChunkBytes);
    const std::size_t slice = ((end - begin) / shares + kLine) / kLine * kLine;
    return std::min(end, begin + s * slice);
  };
  const auto share_here = [&](std::size_t begin, std::size_t end, int from) {
    if (width() == 1 || begin == end) return;
    const std::vector<TensorView> pieces = pieces_of(whole, begin, end);
    inside(2, [&](const CallOptions& o) { inner_->broadcast(pieces, from, o); });
  };
  const auto send_on = [&](std::size_t k) {
    if (share >= shares) return;
    for (int next = 1; next < n; ++next) {
      const int m = (here + next) % n;
      if (m == machine_of(root) || (chain && next > 1) || (!chain && place != 0)) continue;
      for (const TensorView& piece : pieces_of(whole, start(k, share), start(k, share + 1))) {
        post_send(partner(m), piece.data, piece.bytes());
      }
    }
    progress();
  };
  const int source = partner(chain ? (here - 1 + n) % n : machine_of(root));
  std::vector<std::uint64_t> arrived;
  for (std::size_t k = 0; place != 0 && k < chunks && share < shares; ++k) {
    for (const TensorView& piece : pieces_of(whole, start(k, share), start(k, share + 1))) {
      post_receive(source, piece.data, piece.bytes());
    }
    arrived.push_back(peer(source).stream.to_receive());
  }
  for (std::size_t k = 0; k < chunks; ++k) {
    if (place == 0) share_here(start(k, 0), start(k, shares), local_of(root));
    if (place != 0 && share < shares) await_received(source, arrived[k]);
    send_on(k);
    for (std::size_t s = 0; place != 0 && s < shares; ++s) {
      share_here(start(k, s), start(k, s + 1), static_cast<int>(s));
    }
  }
  await_all_sent();
}

// Gathers the arrays of this machine's ranks, on `root` or, if it is -1, on all of them. `out` has
// room for every rank's array, and receives those of this machine.
void NetCommunicator::gather_here(TensorView in, std::byte* out, int root) {
  const std::size_t bytes = in.bytes();
  const std::vector<int>& here = ranks_of(machine_of(rank_));
  const bool has_result = root < 0 || rank_ == root;
  std::byte* target = nullptr;
  if (has_result) {
    target = is_contiguous() ? out + static_cast<std::size_t>(here.front()) * bytes
                             : unpacked_.of(*inner_, here.size() * bytes);
  }
  const TensorView own = bytes_at(in.data, bytes);
  const TensorView joined = bytes_at(target, has_result ? here.size() * bytes : 0);
  inside(2, [&](const CallOptions& o) {
    if (root < 0) {
      inner_->all_gather(own, joined, o);
    } else {
      inner_->gather(own, joined, local_of(root), o);
    }
  });
  if (!has_result || is_contiguous()) return;
  for (std::size_t i = 0; i < here.size(); ++i) {
    host::copy(out + static_cast<std::size_t>(here[i]) * bytes, target + i * bytes, bytes, false);
  }
}

// Copies the arrays of `bytes` bytes that came with the records, in the order of their ranks.
void NetCommunicator::copy_payloads(std::byte* to, std::size_t bytes) const {
  for (std::size_t i = 0; bytes != 0 && i < order_.size(); ++i) {
    std::memcpy(to + static_cast<std::size_t>(order_[i]) * bytes, records_[i].payload.data(),
                bytes);
  }
}

// Every array is sent once to each other machine, to one rank, which distributes it there.
void NetCommunicator::all_gather(TensorView in, TensorView out, const CallOptions& options) {
  const std::size_t bytes = in.bytes();
  const auto copy = [&] { copy_payloads(out.data, bytes); };
  run(signature_of({.op = Op::kAllGather}, {&in, 1}), options, {&in, 1}, copy, [&] {
    const int here = machine_of(rank_);
    std::vector<std::uint64_t> from(places_.size());
    for (int q = 0; q < size(); ++q) {
      if (is_here(q) || local_of(q) % width() != local_of(rank_)) continue;
      from[static_cast<std::size_t>(q)] = peer(q).stream.to_receive();
      post_receive(q, out.data + static_cast<std::size_t>(q) * bytes, bytes);
    }
    std::vector<std::uint64_t> to(machines_.size());
    for (int step = 1; step < machines(); ++step) {
      const int m = (here + step) % machines();
      to[static_cast<std::size_t>(m)] = peer(partner(m)).stream.to_send();
      post_send(partner(m), in.data, bytes);
    }
    progress();
    gather_here(in, out.data, -1);
    for (std::size_t begin = 0; begin < bytes; begin += kChunkBytes) {
      const std::size_t end = std::min(bytes, begin + kChunkBytes);
      // A rank sends little while it waits for others of its machine. So every rank sends a piece
      // before it waits for pieces to be distributed; otherwise machines may wait for each other.
      for (int m = 0; m < machines(); ++m) {
        if (m != here) await_sent(partner(m), to[static_cast<std::size_t>(m)] + end);
      }
      for (const int q : order_) {
        if (is_here(q)) continue;
        const int reader = local_of(q) % width();
        if (reader == local_of(rank_)) await_received(q, from[static_cast<std::size_t>(q)] + end);
        if (width() == 1) continue;
        const TensorView piece =
            bytes_at(out.data + static_cast<std::size_t>(q) * bytes + begin, end - begin);
        inside(2, [&](const CallOptions& o) { inner_->broadcast({&piece, 1}, reader, o); });
      }
    }
    await_all_sent();
  });
}

void NetCommunicator::gather(TensorView in, TensorView out, int root, const CallOptions& options) {
  const std::size_t bytes = in.bytes();
  const auto copy = [&] {
    if (rank_ == root) copy_payloads(out.data, bytes);
  };
  run(signature_of(rooted(Op::kGather, root), {&in, 1}), options, {&in, 1}, copy, [&] {
    if (rank_ == root) {
      for (int q = 0; q < size(); ++q) {
        if (!is_here(q)) post_receive(q, out.data + static_cast<std::size_t>(q) * bytes, bytes);
      }
    } else if (!is_here(root)) {
      post_send(root, in.data, bytes);
    }
    progress();
    if (is_here(root)) gather_here(in, out.data, root);
    await_all_received();
    await_all_sent();
  });
}

void NetCommunicator::scatter(TensorView in, TensorView out, int root, const CallOptions& options) {
  run(signature_of(rooted(Op::kScatter, root), {&out, 1}), options, {}, nullptr, [&] {
    exchange(in.data, out.data, [&](int from, int) { return from == root ? out.bytes() : 0; });
  });
}

void NetCommunicator::all_to_all(TensorView in, TensorView out, std::span<const std::size_t> counts,
                                 const CallOptions& options) {
  const std::size_t n = places_.size();
  run(all_to_all_signature({&in, 1}, counts), options, {}, nullptr, [&] {
    exchange(in.data, out.data, [&](int from, int to) {
      const std::size_t at = static_cast<std::size_t>(from) * n + static_cast<std::size_t>(to);
      return counts.empty() ? in.bytes() / n : counts[at] * size_of(in.dtype);
    });
  });
}

// Moves `bytes_between(from, to)` bytes from each rank to each.
void NetCommunicator::exchange(std::byte* in, std::byte* out, const auto& bytes_between) {
  std::vector<std::byte*> give{in}, take{out};  // where the bytes to and from each rank begin
  for (int q = 0; q < size(); ++q) {
    give.push_back(give.back() + bytes_between(rank_, q));
    take.push_back(take.back() + bytes_between(q, rank_));
  }
  for (int step = 1; step < size(); ++step) {  // no two ranks send to the same rank in a step
    const int to = (rank_ + step) % size();
    const int from = (rank_ + size() - step) % size();
    if (!is_here(from)) {
      post_receive(from, take[static_cast<std::size_t>(from)], bytes_between(from, rank_));
    }
    if (!is_here(to)) post_send(to, give[static_cast<std::size_t>(to)], bytes_between(rank_, to));
  }
  progress();
  const std::vector<int>& here = ranks_of(machine_of(rank_));
  std::vector<std::size_t> table;  // the bytes between the ranks of this machine
  std::size_t give_bytes = 0;
  std::size_t take_bytes = 0;
  for (const int from : here) {
    for (const int to : here) {
      table.push_back(bytes_between(from, to));
      if (from == rank_) give_bytes += table.back();
      if (to == rank_) take_bytes += table.back();
    }
  }
  const auto first = static_cast<std::size_t>(here.front());
  const auto end = static_cast<std::size_t>(here.back()) + 1;
  // Bytes that lie in one run are given from, and taken to, where they are.
  const bool packs = give[end] != give[first] + give_bytes;
  const bool unpacks = take[end] != take[first] + take_bytes;
  std::byte* source = packs ? packed_.of(*inner_, give_bytes) : give[first];
  std::byte* target = unpacks ? unpacked_.of(*inner_, take_bytes) : take[first];
  if (packs) {
    std::byte* to = source;
    for (const int q : here) {
      host::copy(to, give[static_cast<std::size_t>(q)], bytes_between(rank_, q), false);
      to += bytes_between(rank_, q);
    }
  }
  const TensorView given = bytes_at(source, give_bytes);
  const TensorView taken = bytes_at(target, take_bytes);
  inside(2, [&](const CallOptions& o) { inner_->all_to_all(given, taken, table, o); });
  for (std::size_t i = 0; unpacks && i < here.size(); ++i) {
    const std::size_t bytes = bytes_between(here[i], rank_);
    host::copy(take[static_cast<std::size_t>(here[i])], target, bytes, false);
    target += bytes;
  }
  await_all_received();
  await_all_sent();
}

}  // namespace fastdist::net
