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
  outgoing_.push_back({data, bytes});
  to_send_ += bytes;
}

void Stream::receive(std::byte* data, std::size_t bytes) {
  incoming_.push_back({data, bytes});
  to_receive_ += bytes;
}

bool Stream::progress() {
  const bool sent = move(outgoing_, sent_, [this](const auto& piece) {
    return ::send(fd_.get(), piece.data, piece.bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  });
  const bool received = move(incoming_, received_, [this](const auto& piece) {
    return ::recv(fd_.get(), piece.data, piece.bytes, MSG_DONTWAIT);
  });
  return sent || received;
}

bool Stream::move(auto& pieces, std::uint64_t& bytes, const auto& call) {
  bool moved = false;
  while (!pieces.empty()) {
    auto& piece = pieces.front();
    const ssize_t n = call(piece);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (n == 0 || errno != EAGAIN) ended_ = true;
      break;
    }
    moved = true;
    bytes += static_cast<std::uint64_t>(n);
    piece.data += n;
    piece.bytes -= static_cast<std::size_t>(n);
    if (piece.bytes != 0) break;  // the kernel's buffer is full, or empty
    pieces.pop_front();
  }
  return moved;
}

}  // namespace fastdist::net
