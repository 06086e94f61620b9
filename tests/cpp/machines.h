// Machines for tests: each has ranks that are threads and share memory with no other machine.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>

#include <memory>
#include <vector>

#include "check.h"
#include "net/connect.h"
#include "net/hello.h"
#include "world.h"

namespace fastdist::test {

using net::Listener;
using net::Place;
using net::Purpose;
using Machines = std::vector<std::vector<int>>;

inline int size_of_world(const Machines& machines) {
  int n = 0;
  for (const auto& ranks : machines) n += static_cast<int>(ranks.size());
  return n;
}

struct World {
  std::vector<Place> places;
  std::vector<std::unique_ptr<Listener>> listeners;
  std::vector<std::shared_ptr<HostCommunicator>> inner;
};

inline World make_world(const Machines& machines) {
  const auto n = static_cast<std::size_t>(size_of_world(machines));
  World world;
  world.places.resize(n);
  world.inner.resize(n);
  for (std::size_t r = 0; r < n; ++r) {
    world.listeners.push_back(std::make_unique<Listener>("127.0.0.1"));
  }
  for (std::size_t m = 0; m < machines.size(); ++m) {
    Ranks inner = make_thread_ranks(static_cast<int>(machines[m].size()), Tuning{});
    for (std::size_t i = 0; i < inner.size(); ++i) {
      const auto rank = static_cast<std::size_t>(machines[m][i]);
      world.inner[rank] = std::move(inner[i]);
      world.places[rank] = {static_cast<int>(m), "127.0.0.1", world.listeners[rank]->port()};
    }
  }
  return world;
}

template <class Call>
inline ErrorCode code_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  throw Failure("no error");
}

inline FileDescriptor connect_to(const Place& place) {
  FileDescriptor fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(place.port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  return fd;
}

template <class T>
bool hears(const FileDescriptor& fd, T& object) {
  return ::recv(fd.get(), &object, sizeof(T), MSG_WAITALL) == static_cast<ssize_t>(sizeof(T));
}

template <class T>
bool say(const FileDescriptor& fd, const T& object) {
  return ::send(fd.get(), &object, sizeof(T), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(T));
}

// Signs by a hash that differs between keys and messages; Python gives ranks HMAC-SHA256.
inline net::Sign signed_by(std::uint64_t key) {
  return [key](std::span<const std::byte> message) {
    net::Digest digest;
    std::uint64_t state = mix(key, 0, 0);
    for (std::byte& out : digest) {
      for (const std::byte b : message) state = mix(state, std::to_integer<std::uint64_t>(b), key);
      out = static_cast<std::byte>(state >> 56);
    }
    return digest;
  };
}

// Connects to rank 0 as rank `rank`; returns no connection if it is not welcome.
inline FileDescriptor connect_as(std::uint32_t rank, Purpose purpose, const Place& place,
                                 const net::Sign& sign = signed_by(0)) {
  FileDescriptor fd = connect_to(place);
  const net::Hello hello{.rank = rank, .purpose = purpose, .nonce = net::make_nonce()};
  net::Challenge challenge;
  std::byte welcome{};
  if (say(fd, hello) && hears(fd, challenge) &&
      say(fd, proof_of(net::Side::kConnects, sign, hello, 0, challenge.nonce)) &&
      hears(fd, welcome) && welcome == net::kWelcome) {
    return fd;
  }
  return FileDescriptor();
}

}  // namespace fastdist::test
