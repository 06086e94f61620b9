// send and recv between machines.
//
// A transfer is a header and the bytes of the array, on the sender's connection. The receiver
// compares the header with its own call and answers; a send returns when the answer has arrived. If
// the two do not match, the receiver drops the bytes and answers with what it expected, the sender
// sends its source line, and both throw.

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/failure.h"
#include "net/communicator.h"

namespace fastdist::net {
namespace {

struct TransferHead {
  std::uint64_t number;
  std::uint64_t signature;
  std::uint64_t count;
  std::uint64_t tag;
};

using Site = std::array<char, 512>;

Site site_of(const Caller& caller) {
  Site site{};
  caller.location().copy(site.data(), site.size() - 1);
  return site;
}

std::byte* bytes_of(auto& object) { return reinterpret_cast<std::byte*>(&object); }

// Returns the signature of a transfer; nothing if `send` cannot have written the header.
std::optional<Signature> parse(const TransferHead& head) {
  const Signature theirs = unpack_signature(head.signature, head.count, 0);
  if (theirs.op != Op::kSend || static_cast<int>(theirs.dtype) >= kDTypeCount) return std::nullopt;
  if (head.count > PTRDIFF_MAX / size_of(theirs.dtype)) return std::nullopt;
  return theirs;
}

}  // namespace

// Runs transfer `number` of a lane: `here(rank, options)` if rank p runs on this machine, or else
// `across(wait)`.
void NetCommunicator::transfer(const Signature& signature, int p, std::uint32_t number,
                               const CallOptions& options, const auto& here, const auto& across) {
  check_usable();
  options.caller->may_block();
  if (options.record != nullptr) options.record->announce(signature);
  Wait wait(calls_, signature, options.caller, number);
  try {
    if (!is_here(p)) return across(wait);
    const Watcher watcher(*this, wait, false);
    here(local_of(p), CallOptions{.timeout = options.timeout,
                                  .caller = &watcher,
                                  .shown = &signature,
                                  .tag = options.tag});
  } catch (const Error& error) {
    if (is_here(p)) throw_inner(error, wait);
    throw;
  } catch (...) {
    abandon({FailureKind::kInterrupted, {rank_}, rank_});
    throw;
  }
}

void NetCommunicator::send(TensorView in, int dst, const CallOptions& options) {
  transfer(
      signature_of(rooted(Op::kSend, dst), {&in, 1}), dst, ++peer(dst).sent, options,
      [&](int local, const CallOptions& o) { inner_->send(in, local, o); },
      [&](Wait& wait) { send_across(in, dst, wait, options); });
}

void NetCommunicator::recv(TensorView out, int src, const CallOptions& options) {
  transfer(
      signature_of(rooted(Op::kRecv, src), {&out, 1}), src, ++peer(src).received, options,
      [&](int local, const CallOptions& o) { inner_->recv(out, local, o); },
      [&](Wait& wait) { recv_across(out, src, wait, options); });
}

std::optional<Message> NetCommunicator::find_message(int src) {
  check_usable();
  if (is_here(src)) return inner_->find_message(local_of(src));
  TransferHead head{};
  const ssize_t n = ::recv(peer(src).in.get(), &head, sizeof(head), MSG_PEEK | MSG_DONTWAIT);
  if (n != static_cast<ssize_t>(sizeof(head))) return std::nullopt;
  const auto theirs = parse(head);
  if (!theirs) fail({FailureKind::kMalformed, {src}, rank_}, rooted(Op::kRecv, src));
  return Message{theirs->dtype, head.count, theirs->order, head.tag};
}

Message NetCommunicator::await_message(int src, TensorView out, const CallOptions& options) {
  const Signature call = signature_of(rooted(Op::kRecv, src), {&out, 1});
  std::optional<Message> found;
  const auto await_across = [&](Wait& wait) {
    const auto start = Clock::now();
    auto last_check = start;
    while (!(found = find_message(src))) {
      char byte = 0;
      if (::recv(peer(src).in.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) {
        throw_ended(src, call);
      }
      await_lane(src, peer(src).in.get(), POLLIN, wait, options, last_check);
      const auto waited = Clock::now() - start;
      if (waited > options.timeout) throw_late(src, wait, waited);
    }
  };
  transfer(
      call, src, peer(src).received + 1, options,
      [&](int local, const CallOptions& o) { found = inner_->await_message(local, out, o); },
      await_across);
  return *found;
}

// Waits until `fd`, a connection to rank p, is ready, or until a short time has passed.
void NetCommunicator::await_lane(int p, int fd, short events, Wait& wait,
                                 const CallOptions& options, Clock::time_point& last_check) {
  pollfd state{fd, events, 0};
  (void)::poll(&state, 1, static_cast<int>(kPollInterval.count()));
  const auto now = Clock::now();
  if (now - last_check < kPollInterval) return;
  last_check = now;
  options.caller->check_interrupt();
  check_failures(wait);
  if (peer(p).sends.load()) peer(p).answers.poll();
}

void NetCommunicator::send_across(TensorView in, int dst, Wait& wait, const CallOptions& options) {
  Peer& them = peer(dst);
  const Signature& signature = wait.signature;
  struct Sending : NonCopyable {
    explicit Sending(std::atomic<bool>& f) : flag(f) { flag.store(true); }
    ~Sending() { flag.store(false); }
    std::atomic<bool>& flag;
  } const sending(them.sends);
  auto start = Clock::now();  // of the wait since bytes last moved
  auto last_check = start;
  int kept = 0;  // bytes that were sent and are still in the kernel's buffer
  const auto pause = [&](int fd, short events) {
    await_lane(dst, fd, events, wait, options, last_check);
    if (them.answers.last().number == wait.number) return;
    if (them.answers.has_closed() || them.answers.has_ended()) throw_ended(dst, signature);
    if (const int left = unacknowledged(them.out.get()); std::exchange(kept, left) != left) {
      start = Clock::now();
    }
    const auto waited = Clock::now() - start;
    if (waited > options.timeout) throw_late(dst, wait, waited);
  };
  const auto write = [&](const std::byte* data, std::size_t bytes) {
    while (bytes > 0) {
      const ssize_t n = ::send(them.out.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n >= 0) {
        data += n;
        bytes -= static_cast<std::size_t>(n);
        start = Clock::now();
        continue;
      }
      if (errno == EINTR) continue;
      if (errno != EAGAIN) throw_ended(dst, signature);
      pause(them.out.get(), POLLOUT);
    }
  };
  TransferHead head{wait.number, signature.packed(), signature.count, options.tag};
  write(bytes_of(head), sizeof(head));
  write(in.data, in.bytes());
  for (;;) {
    them.answers.poll();
    const Acknowledgement answer = them.answers.last();
    if (answer.number == head.number) {
      if (!answer.is_mismatch) return;
      Site site = site_of(*options.caller);
      write(bytes_of(site), sizeof(site));
      throw transfer_mismatch_of(head.number, rank_, {signature, site.data()}, dst,
                                 {answer.signature, answer.site});
    }
    pause(them.out.get(), POLLIN);
  }
}

void NetCommunicator::recv_across(TensorView out, int src, Wait& wait, const CallOptions& options) {
  Peer& them = peer(src);
  const Signature& signature = wait.signature;
  auto start = Clock::now();  // of the wait since bytes last moved
  auto last_check = start;
  const auto read = [&](std::byte* data, std::size_t bytes) {
    while (bytes > 0) {
      const ssize_t n = ::recv(them.in.get(), data, bytes, MSG_DONTWAIT);
      if (n > 0) {
        data += n;
        bytes -= static_cast<std::size_t>(n);
        start = Clock::now();
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      if (n == 0 || errno != EAGAIN) throw_ended(src, signature);
      await_lane(src, them.in.get(), POLLIN, wait, options, last_check);
      const auto waited = Clock::now() - start;
      if (waited > options.timeout) throw_late(src, wait, waited);
    }
  };
  TransferHead head{};
  read(bytes_of(head), sizeof(head));
  const auto parsed = parse(head);
  if (!parsed) fail({FailureKind::kMalformed, {src}, rank_}, signature);
  const Signature& theirs = *parsed;
  if (theirs.dtype == signature.dtype && theirs.count == signature.count &&
      theirs.order == signature.order) {
    read(out.data, out.bytes());
    return them.writer.acknowledge({head.number, false, {}, ""});
  }
  std::vector<std::byte> dropped(std::size_t{64} << 10);
  for (std::size_t left = theirs.count * size_of(theirs.dtype); left > 0;) {
    const std::size_t part = std::min(left, dropped.size());
    read(dropped.data(), part);
    left -= part;
  }
  Site own = site_of(*options.caller);
  them.writer.acknowledge({head.number, true, signature, own.data()});
  Site site{};
  read(bytes_of(site), sizeof(site));
  site.back() = '\0';
  throw transfer_mismatch_of(head.number, rank_, {signature, own.data()}, src,
                             {theirs, site.data()});
}

}  // namespace fastdist::net
