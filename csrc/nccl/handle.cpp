#include "nccl/handle.h"

#include <future>
#include <thread>
#include <utility>

#include "cuda/devices.h"
#include "cuda/stream.h"

namespace fastdist::nccl {
namespace {

constexpr std::size_t kMebibyte = std::size_t{1} << 20;
// If the GPU has less free memory, NCCL needs more: it does not say which CUDA call failed.
constexpr std::size_t kLittleMemory = 256 * kMebibyte;

}  // namespace

const abi::Functions& functions() {
  const Library* library = loaded_library();
  if (library == nullptr) throw Error(ErrorCode::kState, "NCCL has not been loaded yet");
  return library->functions;
}

Error to_error(abi::Result result, const std::string& call, abi::Comm comm) {
  const abi::Functions& f = functions();
  std::string message = "NCCL: " + call + ": " + f.error_text(result);
  const char* detail = f.last_error_text(comm);
  if (detail != nullptr && detail[0] != '\0') message += " (" + std::string(detail) + ")";
  switch (result) {
    case abi::kRemoteError:
      return {ErrorCode::kPeerFailure, message + "; a rank has died or cannot be reached"};
    case abi::kSystemError:
      return {ErrorCode::kSystem, message};
    case abi::kInvalidArgument:
      return {ErrorCode::kValue, message};
    case abi::kUnhandledCudaError:
      if (const std::size_t free = cuda::free_bytes(); free < kLittleMemory) {
        return {ErrorCode::kMemory, message + "; the GPU has " + std::to_string(free / kMebibyte) +
                                        " MiB of free memory, and NCCL needs more"};
      }
      break;
    case abi::kSuccess:
    case abi::kInternalError:
    case abi::kInvalidUsage:
    case abi::kInProgress:
      break;
  }
  return {ErrorCode::kState, message + "; set NCCL_DEBUG=WARN for details"};
}

void Handle::check_usable() const {
  if (generation_ != process_generation()) {
    throw Error(ErrorCode::kState,
                "the communicator belongs to the parent process, and GPUs cannot be used after a "
                "fork; start ranks with a launcher");
  }
  if (is_usable()) return;
  const std::lock_guard lock(mutex_);
  throw Error(failure_->code(), failure_->what(), failure_->ranks());
}

void Handle::throw_failure(abi::Result result, const char* call) const {
  // If another thread aborted the call, `result` follows from that, so throw the reason instead.
  check_usable();
  throw to_error(result, call, comm_);
}

std::optional<Error> Handle::background_error() const {
  abi::Result result = abi::kSuccess;
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return std::nullopt;  // NCCL no longer knows the communicator
    const abi::Result asked = functions().get_async_error(comm_, &result);
    if (asked != abi::kSuccess) result = asked;
  }
  if (result == abi::kSuccess) return std::nullopt;
  return to_error(result, "asynchronous error", comm_);
}

void Handle::hold_until_end(const std::shared_ptr<const void>& memory) {
  const std::lock_guard lock(mutex_);
  std::erase_if(held_, [](const auto& held) { return held.expired(); });
  held_.emplace_back(memory);
}

bool Handle::set_failure(const Error& why, const std::function<void()>& tell) noexcept {
  const std::lock_guard lock(mutex_);
  const bool is_first = is_usable();
  // A mismatch replaces NCCL's own error: it causes such errors, but may be found after them.
  if (!is_first && (why.code() != ErrorCode::kMismatch || !failure_)) return false;
  failure_.emplace(why);
  if (!is_first) return false;
  if (tell) tell();
  failed_.store(true, std::memory_order_release);
  return true;
}

// NCCL's destroy and abort wait until every graph with calls of the communicator is destroyed,
// which may never happen, so they run in a detached thread.
void Handle::end(abi::Result (*call)(abi::Comm)) noexcept {
  constexpr std::chrono::seconds kWithGraphs{1};
  constexpr std::chrono::seconds kWithout{30};
  try {
    std::vector<std::shared_ptr<const void>> held;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& memory : held_) held.push_back(memory.lock());
    }
    std::promise<void> ended;
    const auto has_ended = ended.get_future();
    std::thread([call, comm = comm_, device = device_, held = std::move(held),
                 ended = std::move(ended)]() mutable {
      try {
        cuda::make_current(device);
        (void)call(comm);
      } catch (...) {  // the process is exiting, and the driver is gone
      }
      held.clear();
      ended.set_value();
    }).detach();
    (void)has_ended.wait_for(is_captured() ? kWithGraphs : kWithout);
  } catch (...) {  // no thread or no memory: the communicator leaks
  }
}

// A call of NCCL in another thread returns when the communicator is aborted.
void Handle::fail(const Error& why, const std::function<void()>& tell) noexcept {
  constexpr std::chrono::milliseconds kForOtherThread{200};
  if (!set_failure(why, tell)) return;
  std::vector<std::weak_ptr<Handle>> others;
  {
    const std::lock_guard lock(mutex_);
    others.swap(others_);
  }
  (void)Use(use_mutex_, kForOtherThread);
  end(functions().abort);
  for (const auto& weak : others) {
    if (const auto other = weak.lock()) other->fail(why);
  }
}

void Handle::share_failures(const std::shared_ptr<Handle>& one,
                            const std::shared_ptr<Handle>& other) {
  {
    const std::lock_guard lock(one->mutex_);
    one->others_.push_back(other);
  }
  const std::lock_guard lock(other->mutex_);
  other->others_.push_back(one);
}

void Handle::close() noexcept {
  if (set_failure({ErrorCode::kState, "the communicator is closed"})) end(functions().destroy);
}

}  // namespace fastdist::nccl
