#include "core/process.h"

#include <pthread.h>

#include <atomic>

namespace fastdist {
namespace {
std::atomic<int> generation{0};
}

int process_generation() noexcept {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++generation; });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace fastdist
