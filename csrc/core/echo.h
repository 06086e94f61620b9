// Threads that answer a peer or another process, however long this process's other threads are
// busy.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/file_descriptor.h"

namespace fastdist {

// Runs `task` in a thread of its own, which takes no signals: they must reach one that runs Python.
// Throws std::system_error.
void start_without_signals(auto task) {
  struct Blocked {
    sigset_t before;
    ~Blocked() { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } blocked;
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &blocked.before);
  std::thread(std::move(task)).detach();
}

inline void answer(const FileDescriptor& connected) noexcept {
  std::array<char, 64> bytes;
  for (;;) {
    const ssize_t got = ::recv(connected.get(), bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    if (::send(connected.get(), bytes.data(), static_cast<std::size_t>(got), MSG_NOSIGNAL) < 0)
      return;
  }
}

// Sends back what comes over a connected socket, in a thread that ends with the connection.
//
// Throws Error (kSystem) if no thread can be made.
inline void echo(FileDescriptor connected) {
  ::fcntl(connected.get(), F_SETFL, ::fcntl(connected.get(), F_GETFL) & ~O_NONBLOCK);
  try {
    start_without_signals([connected = std::move(connected)] { answer(connected); });
  } catch (const std::system_error& error) {
    refuse(ErrorCode::kSystem, "no thread for heartbeats: ", error.what());
  }
}

}  // namespace fastdist
