// Identifies this process by its number of forks, and finds the objects that live in it.
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace fastdist {

// Returns the number of forks between the first process and this one. An object created under
// another number belongs to an ancestor process and must not be used.
[[nodiscard]] inline int process_generation() noexcept {
  static std::atomic<int> generation{0};
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++generation; });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

// The objects of a class that live in this process. Thread-safe. A forked child begins without
// objects: those of its parent cannot be used, and a thread of the parent may have held the mutex
// at the fork.
template <class Object>
class Registry {
 public:
  static void add(Object& object) {
    State& state = current();
    const std::lock_guard lock(state.mutex);
    state.objects.push_back(&object);
  }
  static void remove(Object& object) noexcept {
    State& state = current();
    const std::lock_guard lock(state.mutex);
    std::erase(state.objects, &object);
  }
  // Calls `function` for each object, none of which can be removed meanwhile.
  static void for_each(auto&& function) {
    State& state = current();
    const std::lock_guard lock(state.mutex);
    for (Object* const object : state.objects) function(*object);
  }

 private:
  struct State {
    int generation = process_generation();
    std::mutex mutex;
    std::vector<Object*> objects;
  };
  // Objects may be destroyed after static variables, so the state never is.
  static State& current() {
    static std::atomic<State*> known{nullptr};
    State* state = known.load();
    while (state == nullptr || state->generation != process_generation()) {
      auto fresh = std::make_unique<State>();
      if (known.compare_exchange_strong(state, fresh.get())) return *fresh.release();
    }
    return *state;
  }
};

}  // namespace fastdist
