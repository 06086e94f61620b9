#include "net/stream.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>

namespace fastdist::net {

int unacknowledged(int fd) noexcept {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

void Stream::send(const std::byte* data, std::size_t bytes) {
  if (bytes == 0) return;
  outgoing_.push_back({data, bytes});
  to_send_ += bytes;
}

void Stream::receive(std::byte* data, std::size_t bytes) {
  if (bytes == 0) return;
  incoming_.push_back({data, bytes});
  to_receive_ += bytes;
}

bool Stream::progress() {
  const bool pushed = push();
  return pull() || pushed;
}

bool Stream::push() {
  bool moved = false;
  while (!outgoing_.empty()) {
    auto& piece = outgoing_.front();
    const ssize_t n = ::send(fd_.get(), piece.data, piece.bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) ended_ = true;
      break;
    }
    moved = true;
    sent_ += static_cast<std::uint64_t>(n);
    piece.data += n;
    piece.bytes -= static_cast<std::size_t>(n);
    if (piece.bytes != 0) break;  // the kernel's buffer is full
    outgoing_.pop_front();
  }
  return moved;
}

bool Stream::pull() {
  bool moved = false;
  while (!incoming_.empty()) {
    auto& piece = incoming_.front();
    const ssize_t n = ::recv(fd_.get(), piece.data, piece.bytes, MSG_DONTWAIT);
    if (n <= 0) {
      if (n < 0 && errno == EINTR) continue;
      if (n == 0 || errno != EAGAIN) ended_ = true;
      break;
    }
    moved = true;
    received_ += static_cast<std::uint64_t>(n);
    piece.data += n;
    piece.bytes -= static_cast<std::size_t>(n);
    if (piece.bytes != 0) break;  // the kernel's buffer is empty
    incoming_.pop_front();
  }
  return moved;
}

}  // namespace fastdist::net
