// Connects the ranks of several machines by TCP.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/communicator.h"
#include "core/file_descriptor.h"
#include "net/hello.h"

namespace fastdist::net {

// Where a rank runs. Ranks with the same `machine` share memory.
struct Place {
  int machine;
  std::string ip;
  std::uint16_t port;
};

// Accepts connections of other ranks at one address of this machine.
class Listener {
 public:
  // Listens at a free port of the numeric address `ip`.
  explicit Listener(const std::string& ip);
  [[nodiscard]] std::uint16_t port() const;
  [[nodiscard]] int fd() const noexcept { return socket_.get(); }

 private:
  FileDescriptor socket_;
};

// The connections between two ranks. `stream` carries collectives, and is unset between ranks of
// one machine. `out` carries what this rank sends, and the peer's answers; `in` carries what the
// peer sends, and this rank's answers.
struct Connections {
  FileDescriptor stream;
  FileDescriptor out;
  FileDescriptor in;
};

// Connects this rank to all others, which prove that they have the key of `sign` (hello.h), and
// returns the connections by rank. Every rank must call. `check` is called regularly, and throws if
// a rank is lost. Throws kTimeout if ranks have not connected within `timeout`, and kPeerFailure if
// a rank leaves before or after it has connected, or if another program answers in its place. A
// rank must keep its listener until this returns.
[[nodiscard]] std::vector<Connections> connect_ranks(
    const Listener& listener, int rank, const std::vector<Place>& places, const Sign& sign,
    std::chrono::nanoseconds timeout, const Caller& caller, const std::function<void()>& check);

}  // namespace fastdist::net
