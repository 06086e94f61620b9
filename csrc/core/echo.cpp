#include "core/echo.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"

namespace fastdist {
namespace {

void answer(const FileDescriptor& connected) noexcept {
  std::array<char, 64> bytes;
  for (;;) {
    const ssize_t got = ::recv(connected.get(), bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    if (::send(connected.get(), bytes.data(), static_cast<std::size_t>(got), MSG_NOSIGNAL) < 0)
      return;
  }
}

}  // namespace

void echo(FileDescriptor connected) {
  ::fcntl(connected.get(), F_SETFL, ::fcntl(connected.get(), F_GETFL) & ~O_NONBLOCK);
  // Signals must reach a thread that runs Python.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([connected = std::move(connected)] { answer(connected); }).detach();
  } catch (const std::system_error& error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Error(ErrorCode::kSystem, std::string("no thread for heartbeats: ") + error.what());
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace fastdist
