#include "net/communicator.h"

#include <sys/socket.h>

#include <cstring>
#include <utility>

#include "core/failure.h"
#include "core/process.h"

namespace fastdist::net {

NetCommunicator::NetCommunicator(std::shared_ptr<host::HostCommunicator> inner, int rank,
                                 std::vector<Place> places, std::vector<Connections> connections)
    : inner_(std::move(inner)),
      rank_(rank),
      places_(std::move(places)),
      local_(places_.size()),
      records_(places_.size()),
      last_(places_.size()) {
  for (int p = 0; p < size(); ++p) {
    const auto machine = static_cast<std::size_t>(machine_of(p));
    if (machine >= machines_.size()) machines_.resize(machine + 1);
    local_[static_cast<std::size_t>(p)] = static_cast<int>(machines_[machine].size());
    machines_[machine].push_back(p);
    Connections& c = connections[static_cast<std::size_t>(p)];
    peers_.push_back(p == rank_ ? nullptr : std::make_unique<Peer>(std::move(c), size()));
  }
  inner_->set_labels(ranks_of(machine_of(rank_)), size());
  for (const std::vector<int>& ranks : machines_) {
    order_.insert(order_.end(), ranks.begin(), ranks.end());
    is_even_ &= ranks.size() == machines_[0].size();
  }
  plan_partials();
  Registry<NetCommunicator>::add(*this);
}

NetCommunicator::~NetCommunicator() {
  if (generation_ == process_generation()) Registry<NetCommunicator>::remove(*this);
  close();
}

void NetCommunicator::close() noexcept {
  if (generation_ != process_generation() || is_closed_.exchange(true)) return;
  for (const auto& peer : peers_) {
    if (!peer) continue;
    peer->writer.tell(AnswerKind::kClosed);
    // Marks the end of this rank's messages, after bytes that are still on their way.
    if (peer->stream.fd() >= 0) ::shutdown(peer->stream.fd(), SHUT_WR);
    ::shutdown(peer->out.get(), SHUT_WR);
  }
  inner_->close();
}

std::shared_ptr<std::byte> NetCommunicator::allocate(std::size_t bytes) {
  check_usable();
  return inner_->allocate(bytes);
}

// Runs a collective. A small `payload` travels with the record if there is a `finish_payload`,
// which then ends the call; otherwise `body` does.
void NetCommunicator::run(const Signature& signature, const CallOptions& options,
                          TensorViews payload, const std::function<void()>& finish_payload,
                          const std::function<void()>& body) {
  check_usable();
  options.caller->may_block();
  ++sequence_;
  options_ = &options;
  Wait wait(calls_, options.whole != nullptr ? *options.whole : signature, options.caller);
  wait_ = &wait;
  const Watcher watcher(*this, wait, true);
  watcher_ = &watcher;
  const Signature& call = wait.signature;
  if (options.record != nullptr) options.record->announce(call);
  Record own{head_of(call), {}};
  last_[static_cast<std::size_t>(rank_)] = own.head;
  std::size_t bytes = 0;
  for (const TensorView& view : payload) bytes += view.bytes();
  const bool travels = finish_payload != nullptr && bytes <= kPayload;
  if (travels) {
    std::byte* at = own.payload.data();
    for (const TensorView& view : payload) {
      if (view.bytes() != 0) std::memcpy(at, view.data, view.bytes());
      at += view.bytes();
    }
  }
  try {
    share(reinterpret_cast<const std::byte*>(&own), sizeof(Record),
          reinterpret_cast<std::byte*>(records_.data()));
    if (options.record != nullptr) options.record->arrive();
    compare();
    travels ? finish_payload() : body();
  } catch (const Error&) {
    throw;  // `fail` has told the others, or the ranks agree on a mismatch
  } catch (...) {
    abandon({FailureKind::kInterrupted, {rank_}, rank_});
    throw;
  }
}

// Gathers `bytes` bytes of every rank on all ranks, in the order of `order_`, with one crossing
// between the first ranks of the machines.
void NetCommunicator::share(const std::byte* own, std::size_t bytes, std::byte* everyone) {
  const auto offset_of = [&](int machine) {
    std::size_t before = 0;
    for (int m = 0; m < machine; ++m) before += ranks_of(m).size();
    return everyone + before * bytes;
  };
  const int here = machine_of(rank_);
  const std::size_t local_bytes = bytes * ranks_of(here).size();
  std::byte* const local = offset_of(here);
  if (width() == 1) {
    std::memcpy(local, own, bytes);
  } else {
    const TensorView in{const_cast<std::byte*>(own), bytes, DType::kUInt8, 0};
    const TensorView out{local, local_bytes, DType::kUInt8, 0};
    inside(0, [&](const CallOptions& o) { inner_->all_gather(in, out, o); });
  }
  if (local_of(rank_) == 0) {
    for (int m = 0; m < machines(); ++m) {
      if (m == here) continue;
      const int p = ranks_of(m)[0];
      post_send(p, local, local_bytes);
      post_receive(p, offset_of(m), bytes * ranks_of(m).size());
    }
    for (int m = 0; m < machines(); ++m) {
      if (m != here) await_received(ranks_of(m)[0]);
    }
    await_all_sent();
  }
  if (width() > 1) {
    const TensorView all{everyone, bytes * places_.size(), DType::kUInt8, 0};
    inside(2, [&](const CallOptions& o) { inner_->broadcast({&all, 1}, 0, o); });
  }
}

void NetCommunicator::compare() {
  const CallHead& first = records_[0].head;
  std::uint64_t list = first.list;
  bool is_same = true;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const CallHead& head = records_[i].head;
    last_[static_cast<std::size_t>(order_[i])] = head;
    is_same &=
        head.signature == first.signature && head.count == first.count && matches(list, head.list);
  }
  if (!is_same) throw_mismatch();
}

// Every rank calls this when signatures differ, so one more crossing can carry the callers' lines.
void NetCommunicator::throw_mismatch() {
  std::array<char, 512> own{};
  options_->caller->location().copy(own.data(), own.size() - 1);
  std::vector<std::byte> sites(places_.size() * own.size());
  share(reinterpret_cast<const std::byte*>(own.data()), own.size(), sites.data());
  std::vector<CallOfRank> calls(places_.size());
  for (std::size_t i = 0; i < order_.size(); ++i) {
    const auto p = static_cast<std::size_t>(order_[i]);
    const auto* text = reinterpret_cast<const char*>(sites.data() + i * own.size());
    calls[p] = {last_[p].call(), std::string(text, ::strnlen(text, own.size()))};
  }
  throw mismatch_of(sequence_, rank_, calls);
}

}  // namespace fastdist::net
