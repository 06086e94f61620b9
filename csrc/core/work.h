// Calls that run later, in the order in which they were made.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "core/process.h"

namespace fastdist {

// A call that was handed to a WorkQueue.
class Work {
 public:
  explicit Work(std::function<void()> task) : task_(std::move(task)) {}

  [[nodiscard]] bool is_done() const;
  // Waits for the end of the call; false when `timeout` passes first. Rethrows what it threw.
  bool wait(std::chrono::nanoseconds timeout);

  void run() noexcept;

 private:
  std::function<void()> task_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::exception_ptr error_;
};

// Runs calls one at a time and in order: at once in the caller's thread when nothing is pending,
// else in a thread of its own, which starts with the first call that is submitted.
class WorkQueue {
 public:
  WorkQueue() = default;
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;
  ~WorkQueue();  // waits for what was submitted

  std::shared_ptr<Work> submit(std::function<void()> task);

  // True when `task` was run here; false, and it was not, when calls are pending before it.
  template <class Task>
  bool try_run(Task&& task) {
    int idle = 0;
    if (!pending_.compare_exchange_strong(idle, kRunningHere, std::memory_order_acquire)) {
      return false;
    }
    struct Release {
      std::atomic<int>& pending;
      ~Release() {
        if (pending.fetch_sub(kRunningHere, std::memory_order_acq_rel) != kRunningHere) {
          pending.notify_all();
        }
      }
    } release{pending_};
    task();
    return true;
  }

 private:
  void loop();

  static constexpr int kRunningHere = 1 << 24;

  // What the thread shares with those who submit. A forked child has no such thread, and can
  // neither join it nor destroy what it waits on: the child's copy is left alone.
  struct State {
    std::mutex mutex;
    std::condition_variable submitted;
    std::deque<std::shared_ptr<Work>> queue;
    bool stopping = false;
    std::thread thread;
  };

  std::atomic<int> pending_{0};  // calls submitted and not ended, plus kRunningHere
  std::unique_ptr<State> state_ = std::make_unique<State>();
  int generation_ = process_generation();
};

}  // namespace fastdist
