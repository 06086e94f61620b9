// Queued calls, run in the order in which they were submitted.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "core/process.h"

namespace fastdist {

// A call submitted to a WorkQueue.
class Work {
 public:
  explicit Work(std::function<void()> task) : task_(std::move(task)) {}
  ~Work();

  [[nodiscard]] bool is_done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Waits for the call to end and rethrows its exception. Returns false if `timeout` passes first.
  // Throws in a forked child, unless the call has ended before: its thread is the parent's.
  bool wait(std::chrono::nanoseconds timeout);

  void run() noexcept;

 private:
  // The parent's threads may have held or awaited these at a fork, so a child leaks its copy.
  struct End {
    std::mutex mutex;
    std::condition_variable changed;
  };

  std::function<void()> task_;
  std::unique_ptr<End> end_ = std::make_unique<End>();
  std::exception_ptr error_;       // written before done_
  std::atomic<bool> done_{false};  // released by `run`, acquired by readers of error_
  int generation_ = process_generation();
};

// Runs calls one at a time and in order: immediately in the caller's thread if nothing is pending,
// otherwise in the queue's own thread, which starts with the first submitted call.
class WorkQueue {
 public:
  WorkQueue() = default;
  ~WorkQueue();  // waits for submitted calls

  std::shared_ptr<Work> submit(std::function<void()> task) { return add(std::move(task), true); }
  // Does the same without waking the queue's thread, if that looks for calls by itself: it does for
  // a moment after each of these calls. Such a call begins up to 0.1 ms later, and costs less here.
  std::shared_ptr<Work> submit_soon(std::function<void()> task) {
    return add(std::move(task), false);
  }
  // Begins such calls now, for a caller that waits for them.
  void hurry();
  // True while a submitted call of any queue has not ended.
  [[nodiscard]] static bool any_pending() noexcept { return all_pending.load() != 0; }
  [[nodiscard]] int pending() const noexcept {
    return pending_.load(std::memory_order_relaxed) % kRunningHere;
  }
  // A call that ends when all calls before it have ended; null if none is pending. In a forked
  // child, which has none of the parent's calls, always null.
  std::shared_ptr<Work> last();
  // The call at whose end `most` calls wait; null if no more than that wait already.
  std::shared_ptr<Work> before(std::size_t most);

  // True in a signal handler that has interrupted a call of this thread.
  [[nodiscard]] bool is_running_here() const noexcept {
    return runner_.load(std::memory_order_relaxed) == &this_thread;
  }
  // True while another thread is in `try_run`.
  [[nodiscard]] bool is_running_elsewhere() const noexcept {
    const char* const runner = runner_.load(std::memory_order_relaxed);
    return runner != nullptr && runner != &this_thread;
  }

  // Runs `task` in this thread and returns true, or returns false if calls are pending.
  bool try_run(auto&& task) {
    int idle = 0;
    if (!pending_.compare_exchange_strong(idle, kRunningHere, std::memory_order_acquire)) {
      return false;
    }
    runner_.store(&this_thread, std::memory_order_relaxed);
    struct Release {
      WorkQueue& queue;
      ~Release() {
        queue.runner_.store(nullptr, std::memory_order_relaxed);
        if (queue.pending_.fetch_sub(kRunningHere, std::memory_order_acq_rel) != kRunningHere) {
          queue.pending_.notify_all();
        }
      }
    } release{*this};
    task();
    return true;
  }

 private:
  void loop();
  std::shared_ptr<Work> add(std::function<void()> task, bool is_urgent);

  static constexpr int kRunningHere = 1 << 24;

  // State shared with the queue's thread. A forked child has no such thread and can neither join it
  // nor destroy its condition variable, so the child leaks its copy.
  struct State {
    std::mutex mutex;
    std::condition_variable submitted;
    std::deque<std::shared_ptr<Work>> queue;
    bool stopping = false;
    bool is_looking = false;  // the thread looks for calls, and need not be woken
    bool looks = false;       // the last call was submitted by `submit_soon`
    std::thread thread;
  };

  inline static thread_local const char this_thread = 0;  // its address identifies a thread
  inline static std::atomic<int> all_pending{0};  // unfinished submitted calls of all queues

  std::atomic<const char*> runner_{nullptr};  // the thread in `try_run`
  std::atomic<int> pending_{0};               // unfinished submitted calls, plus kRunningHere
  std::unique_ptr<State> state_ = std::make_unique<State>();
  int generation_ = process_generation();
};

}  // namespace fastdist
