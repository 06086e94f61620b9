// Moves the bytes of collectives between machines, and waits for them.

#include <poll.h>

#include <algorithm>
#include <utility>

#include "net/communicator.h"

namespace fastdist::net {

void NetCommunicator::post_send(int p, const std::byte* data, std::size_t bytes) {
  if (bytes == 0) return;
  peer(p).stream.send(data, bytes);
  note_busy(p);
}

void NetCommunicator::post_receive(int p, std::byte* data, std::size_t bytes) {
  if (bytes == 0) return;
  peer(p).stream.receive(data, bytes);
  note_busy(p);
}

void NetCommunicator::note_busy(int p) {
  if (std::find(busy_.begin(), busy_.end(), p) == busy_.end()) busy_.push_back(p);
}

void NetCommunicator::await_received(int p, std::uint64_t bytes) {
  await(p, [&stream = peer(p).stream, bytes] { return stream.received() >= bytes; });
}

void NetCommunicator::await_sent(int p, std::uint64_t bytes) {
  await(p, [&stream = peer(p).stream, bytes] { return stream.sent() >= bytes; });
}

void NetCommunicator::await_all_received() {
  for (int p = 0; p < size(); ++p) {
    if (!is_here(p)) await_received(p);
  }
}

void NetCommunicator::await_all_sent() {
  for (int p = 0; p < size(); ++p) {
    if (!is_here(p)) await_sent(p);
  }
}

void NetCommunicator::await_from_partners(const std::vector<std::uint64_t>& bytes) {
  for (int m = 0; m < machines(); ++m) {
    if (m != machine_of(rank_)) await_received(partner(m), bytes[static_cast<std::size_t>(m)]);
  }
}

void NetCommunicator::await_to_partners(const std::vector<std::uint64_t>& bytes) {
  for (int m = 0; m < machines(); ++m) {
    if (m != machine_of(rank_)) await_sent(partner(m), bytes[static_cast<std::size_t>(m)]);
  }
}

bool NetCommunicator::progress() {
  bool moved = false;
  std::size_t kept = 0;
  for (const int p : busy_) {
    Stream& stream = peer(p).stream;
    moved |= stream.progress();
    if ((stream.sends() || stream.receives()) && !stream.has_ended()) busy_[kept++] = p;
  }
  busy_.resize(kept);
  if (moved) moved_at_ = Clock::now().time_since_epoch().count();
  return moved;
}

// Waits until `ready`, which depends on the stream of rank p. The timeout restarts whenever bytes
// move.
void NetCommunicator::await(int p, const std::function<bool()>& ready) {
  if (ready()) return;
  auto start = Clock::now();
  auto last_check = start;
  int kept = 0;  // bytes that were sent and are still in the kernel's buffer
  for (;;) {
    const bool moved = progress();
    if (ready()) return;
    if (peer(p).stream.has_ended()) throw_ended(p, wait_->signature);
    if (!moved) {
      std::vector<pollfd> fds;
      for (const int q : busy_) {
        const Stream& stream = peer(q).stream;
        const int events = (stream.sends() ? POLLOUT : 0) | (stream.receives() ? POLLIN : 0);
        fds.push_back({stream.fd(), static_cast<short>(events), 0});
      }
      (void)::poll(fds.data(), fds.size(), static_cast<int>(kPollInterval.count()));
    }
    const auto now = Clock::now();
    if (moved) start = now;
    if (now - last_check < kPollInterval) continue;
    last_check = now;
    if (const int left = unacknowledged(peer(p).stream.fd()); std::exchange(kept, left) != left) {
      start = now;
    }
    options_->caller->check_interrupt();
    progress();
    if (ready()) return;
    check_failures(*wait_);
    peer(p).answers.poll();
    // Bytes that a rank sent before it closed the communicator may still be on their way.
    if (peer(p).answers.has_closed() && !peer(p).stream.receives())
      throw_ended(p, wait_->signature);
    if (now - start > options_->timeout + kGrace) throw_late(p, *wait_, now - start);
  }
}

}  // namespace fastdist::net
