#include "core/work.h"

#include <system_error>

#include "core/error.h"

namespace fastdist {
namespace {

constexpr int kLooks = 20;
constexpr std::chrono::microseconds kBetweenLooks{50};

}  // namespace

Work::~Work() {
  if (generation_ != process_generation()) (void)end_.release();
}

bool Work::wait(std::chrono::nanoseconds timeout) {
  if (!is_done()) {
    if (generation_ != process_generation()) {
      throw Error(ErrorCode::kState,
                  "the call was made before a fork: only the parent process can wait for it");
    }
    std::unique_lock lock(end_->mutex);
    if (!end_->changed.wait_for(lock, timeout, [this] { return is_done(); })) return false;
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

void Work::run() noexcept {
  try {
    task_();
  } catch (...) {
    error_ = std::current_exception();
  }
  const std::lock_guard lock(end_->mutex);
  done_.store(true, std::memory_order_release);
  end_->changed.notify_all();
}

WorkQueue::~WorkQueue() {
  if (generation_ != process_generation()) {
    (void)state_.release();
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->submitted.notify_all();
  }
  if (state_->thread.joinable()) state_->thread.join();
}

void WorkQueue::hurry() {
  if (generation_ != process_generation()) return;
  const std::lock_guard lock(state_->mutex);
  state_->submitted.notify_all();
}

std::shared_ptr<Work> WorkQueue::last() {
  if (pending() == 0 || generation_ != process_generation()) return nullptr;
  return submit([] {});
}

std::shared_ptr<Work> WorkQueue::before(std::size_t most) {
  const std::lock_guard lock(state_->mutex);
  const auto& queue = state_->queue;
  return queue.size() > most ? queue[queue.size() - 1 - most] : nullptr;
}

std::shared_ptr<Work> WorkQueue::add(std::function<void()> task, bool is_urgent) {
  auto work = std::make_shared<Work>(std::move(task));
  pending_.fetch_add(1, std::memory_order_acquire);
  const std::lock_guard lock(state_->mutex);
  if (!state_->thread.joinable()) {
    try {
      state_->thread = std::thread([this] { loop(); });
    } catch (const std::system_error& error) {
      pending_.fetch_sub(1, std::memory_order_release);
      refuse(ErrorCode::kSystem,
             "cannot start the thread that runs asynchronous calls: ", error.code().message(),
             "; the machine or this user has too many threads");
    }
  }
  all_pending.fetch_add(1);
  state_->queue.push_back(work);
  state_->looks = !is_urgent;
  if (is_urgent || !state_->is_looking) state_->submitted.notify_all();
  return work;
}

void WorkQueue::loop() {
  std::unique_lock lock(state_->mutex);
  const auto has_work = [this] { return state_->stopping || !state_->queue.empty(); };
  for (;;) {
    state_->is_looking = state_->looks;
    for (int i = 0; state_->is_looking && i < kLooks && !has_work(); ++i) {
      state_->submitted.wait_for(lock, kBetweenLooks);
    }
    state_->is_looking = false;
    state_->submitted.wait(lock, has_work);
    if (state_->queue.empty()) return;
    const auto work = std::move(state_->queue.front());
    state_->queue.pop_front();
    lock.unlock();
    for (int seen; (seen = pending_.load(std::memory_order_acquire)) >= kRunningHere;) {
      pending_.wait(seen, std::memory_order_acquire);  // an earlier call runs in another thread
    }
    work->run();
    all_pending.fetch_sub(1);
    pending_.fetch_sub(1, std::memory_order_release);
    lock.lock();
  }
}

}  // namespace fastdist
