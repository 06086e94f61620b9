// One end of a connection that carries the bytes of collectives in both directions. Nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "core/file_descriptor.h"

namespace fastdist::net {

// Returns the number of bytes in the kernel's send buffer, which the peer has not acknowledged.
[[nodiscard]] int unacknowledged(int fd) noexcept;

class Stream {
 public:
  explicit Stream(FileDescriptor fd) : fd_(std::move(fd)) {}

  // Queue memory to send, or to receive into: a byte or more. It must stay valid until the bytes
  // have moved.
  void send(const std::byte* data, std::size_t bytes);
  void receive(std::byte* data, std::size_t bytes);

  // Moves what can be moved without waiting. Returns true if any byte has moved.
  bool progress();

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] bool sends() const noexcept { return sent_ < to_send_; }
  [[nodiscard]] bool receives() const noexcept { return received_ < to_receive_; }
  // Numbers of bytes since the connection was made.
  [[nodiscard]] std::uint64_t to_send() const noexcept { return to_send_; }
  [[nodiscard]] std::uint64_t to_receive() const noexcept { return to_receive_; }
  [[nodiscard]] std::uint64_t sent() const noexcept { return sent_; }
  [[nodiscard]] std::uint64_t received() const noexcept { return received_; }
  // True once the peer has closed the connection, or it was lost.
  [[nodiscard]] bool has_ended() const noexcept { return ended_; }

 private:
  template <class Byte>
  struct Piece {
    Byte* data;
    std::size_t bytes;
  };
  // Moves what `call(piece)` can move of the pieces, and counts the bytes.
  bool move(auto& pieces, std::uint64_t& bytes, const auto& call);

  FileDescriptor fd_;
  std::deque<Piece<const std::byte>> outgoing_;
  std::deque<Piece<std::byte>> incoming_;
  std::uint64_t to_send_ = 0, to_receive_ = 0, sent_ = 0, received_ = 0;
  bool ended_ = false;
};

}  // namespace fastdist::net
