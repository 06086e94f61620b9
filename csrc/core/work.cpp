#include "core/work.h"

#include <utility>

namespace fastdist {

bool Work::is_done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

bool Work::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  if (!ended_.wait_for(lock, timeout, [this] { return done_; })) return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

void Work::run() noexcept {
  std::exception_ptr error;
  try {
    task_();
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  error_ = error;
  done_ = true;
  ended_.notify_all();
}

WorkQueue::~WorkQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    submitted_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Work> WorkQueue::submit(std::function<void()> task) {
  auto work = std::make_shared<Work>(std::move(task));
  pending_.fetch_add(1, std::memory_order_acquire);
  const std::lock_guard lock(mutex_);
  queue_.push_back(work);
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  submitted_.notify_all();
  return work;
}

void WorkQueue::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const auto work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    for (int seen; (seen = pending_.load(std::memory_order_acquire)) >= kRunningHere;) {
      pending_.wait(seen, std::memory_order_acquire);  // a call that came before runs elsewhere
    }
    work->run();
    pending_.fetch_sub(1, std::memory_order_release);
    lock.lock();
  }
}

}  // namespace fastdist
