#include "nccl/watcher.h"

#include <utility>

#include "core/failure.h"

namespace fastdist::nccl {
namespace {

constexpr std::chrono::milliseconds kPollInterval{20};
constexpr std::chrono::seconds kBeforeLivenessCheck{1};
constexpr std::chrono::seconds kUntilCompared{1};
constexpr int kPollsUntilBlamed = 5;

}  // namespace

cuda::Event EventPool::take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return {};
  cuda::Event event = std::move(free_.back());
  free_.pop_back();
  return event;
}

void EventPool::give_back(cuda::Event event) noexcept {
  const std::lock_guard lock(mutex_);
  if (free_.size() < kMost) free_.push_back(std::move(event));
}

EventMark::EventMark(std::shared_ptr<EventPool> pool, StreamHandle stream, bool captured)
    : pool_(std::move(pool)), event_(pool_->take()), stream_(stream), captured_(captured) {
  event_.record(stream);
  if (captured) capture_ = cuda::capture_of(stream);
}

bool EventMark::uses_arrays() const {
  if (!captured_) return !event_.is_done();
  return capture_ && cuda::capture_of(stream_) == capture_;
}

Watcher::Watcher(std::shared_ptr<Handle> handle, const Connection& connection,
                 std::optional<std::uint16_t> recorded)
    : handle_(std::move(handle)),
      rank_(connection.rank),
      checker_(connection.checker),
      recorded_(recorded) {}

Watcher::~Watcher() {
  if (generation_ != process_generation()) {
    (void)state_.release();
    return;
  }
  if (recorded_) recorder::close_communicator(*recorded_);
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  if (state_->thread.joinable()) state_->thread.join();
}

void Watcher::enter(const Signature& signature, const CallOptions& options) {
  const std::lock_guard lock(state_->mutex);
  const bool was_idle = state_->calls.empty();
  std::shared_ptr<recorder::Record> record;
  if (recorder::File* const file = recorded_ ? recorder::file.load() : nullptr) {
    record =
        std::make_shared<recorder::Record>(*file, *recorded_, ++calls_, options.caller->site());
    record->announce(signature);
  }
  state_->calls.push_back({signature, options.timeout, Clock::now(), nullptr, std::move(record)});
  if (!state_->thread.joinable()) state_->thread = std::thread([this] { loop(); });
  if (was_idle) state_->changed.notify_all();
}

void Watcher::enqueued(std::shared_ptr<const Mark> mark) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->calls.empty()) state_->calls.back().mark = std::move(mark);
}

void Watcher::withdraw() noexcept {
  const std::lock_guard lock(state_->mutex);
  if (!state_->calls.empty() && !state_->calls.back().mark) state_->calls.pop_back();
  state_->drained.notify_all();
}

void Watcher::drain() noexcept {
  if (generation_ != process_generation()) return;
  std::unique_lock lock(state_->mutex);
  state_->drained.wait(lock, [this] { return state_->calls.empty() || !handle_->is_usable(); });
}

void Watcher::drop_done(std::unique_lock<std::mutex>& lock) {
  auto& calls = state_->calls;
  while (!calls.empty()) {
    const auto mark = calls.front().mark;
    if (!mark) break;
    lock.unlock();  // callers need not wait for queries of the device
    const bool is_done = mark->is_done();
    lock.lock();
    if (!is_done) break;
    if (const auto& record = calls.front().record) record->succeed();
    calls.pop_front();
  }
  if (calls.empty()) state_->drained.notify_all();
}

void Watcher::poll(std::unique_lock<std::mutex>& lock) {
  drop_done(lock);
  if (state_->calls.empty()) {
    polls_with_error_ = 0;
    return;
  }
  const Call oldest = state_->calls.front();
  const auto age = Clock::now() - oldest.start;
  lock.unlock();
  std::optional<Error> error;
  bool is_of_nccl = false;
  if (age > oldest.timeout) {
    const Failure failure{FailureKind::kUnfinished, {}, rank_, oldest.timeout};
    error = error_in(failure, oldest.signature, rank_, {});
  } else {
    error = handle_->background_error();
    is_of_nccl = error.has_value();
    // NCCL does not say which rank it has lost.
    const bool is_of_peer = is_of_nccl && error->code() == ErrorCode::kPeerFailure;
    const bool is_old = !is_of_nccl && age > kBeforeLivenessCheck;
    const bool may_ask = checker_ != nullptr && (is_of_peer || is_old);
    if (const auto lost = may_ask ? checker_->find_lost() : std::nullopt) {
      error = error_in({FailureKind::kAborted, {*lost}, rank_}, oldest.signature, rank_, {});
    }
  }
  // If a comparison fails, because calls differ or a rank is late, its error is reported instead.
  if (error && checker_ != nullptr) (void)checker_->settle(kUntilCompared);
  lock.lock();
  // Peers that have seen a mismatch abort, perhaps while this rank's previous call is still ending
  // and before it makes the call that does not match.
  polls_with_error_ = is_of_nccl ? polls_with_error_ + 1 : 0;
  if (error && (!is_of_nccl || polls_with_error_ >= kPollsUntilBlamed)) throw *error;
}

void Watcher::loop() {
  try {
    cuda::make_current(handle_->device());
    // Querying events must not invalidate another thread's capture.
    const cuda::RelaxedCapture relaxed;
    std::unique_lock lock(state_->mutex);
    while (!state_->stopping) {
      if (state_->calls.empty()) {
        state_->changed.wait(lock, [this] { return state_->stopping || !state_->calls.empty(); });
        continue;
      }
      poll(lock);
      state_->changed.wait_for(lock, kPollInterval, [this] { return state_->stopping; });
    }
  } catch (const Error& error) {  // pending work cannot succeed, and no call follows
    handle_->fail(error);
    const std::lock_guard lock(state_->mutex);
    state_->calls.clear();
    state_->drained.notify_all();
  }
}

}  // namespace fastdist::nccl
