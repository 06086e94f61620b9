#include "net/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace fastdist::net {
namespace {

struct Guarded {
  std::mutex mutex;
  std::set<int> fds;
};

// Never destroyed, since a fork may come at any time.
Guarded& guarded() {
  static auto* const all = [] {
    auto* made = new Guarded;
    ::pthread_atfork([] { guarded().mutex.lock(); }, [] { guarded().mutex.unlock(); },
                     [] {
                       const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
                       for (const int fd : guarded().fds) {
                         if (null >= 0) ::dup3(null, fd, O_CLOEXEC);
                       }
                       if (null >= 0) ::close(null);
                       guarded().fds.clear();
                       guarded().mutex.unlock();
                     });
    return made;
  }();
  return *all;
}

}  // namespace

void guard_from_forks(int fd) {
  Guarded& all = guarded();
  const std::lock_guard lock(all.mutex);
  all.fds.insert(fd);
}

void unguard_from_forks(int fd) noexcept {
  Guarded& all = guarded();
  const std::lock_guard lock(all.mutex);
  all.fds.erase(fd);
}

}  // namespace fastdist::net
