// The owner of an ncclComm, and of the reason why it can no longer be used. Shared by the
// communicator, the thread that watches it, and memory that is registered with it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/communicator.h"
#include "core/error.h"
#include "core/process.h"
#include "nccl/library.h"

namespace fastdist::nccl {

// The loaded library's functions; throws where none was loaded.
[[nodiscard]] const abi::Functions& functions();
// The Error that a result of NCCL stands for.
[[nodiscard]] Error to_error(abi::Result result, const std::string& call, abi::Comm comm);

class Handle {
 public:
  // Takes over `comm`, which may still be connecting (a non-blocking one).
  Handle(abi::Comm comm, int device, bool blocking);
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle();

  [[nodiscard]] abi::Comm get() const noexcept { return comm_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] bool is_blocking() const noexcept { return blocking_; }
  [[nodiscard]] bool is_usable() const noexcept {
    return !failed_.load(std::memory_order_acquire) && generation_ == process_generation();
  }
  // Throws why it is not usable.
  void check_usable() const;

  // Throws unless a call of NCCL went well.
  void check(abi::Result result, const char* call) const {
    if (result != abi::kSuccess) throw_unless_settled(result, call);
  }
  // Non-blocking communicators: waits until the last call is through. Gives the communicator up
  // when `options.timeout` passes or the caller is interrupted.
  void settle(const CallOptions& options, const char* call);

  // NCCL's report of what went wrong in the background; nothing where all is well.
  [[nodiscard]] std::optional<Error> background_error() const;

  // Ends all that runs, for this reason, which every later call throws; NCCL no longer knows the
  // communicator then. Only the first counts.
  void fail(const Error& why) noexcept;
  void close() noexcept;
  // Memory that NCCL may use until it has ended, though nobody else holds it any more.
  void hold_until_end(const std::shared_ptr<const void>& memory);
  // A call is in a graph, which lives for as long as its owner likes.
  void note_capture() noexcept { captured_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool is_captured() const noexcept {
    return captured_.load(std::memory_order_relaxed);
  }

 private:
  void throw_unless_settled(abi::Result result, const char* call) const;
  // What NCCL reports of the last call and of the background; success where it was given up.
  [[nodiscard]] abi::Result report() const;
  // False: it was given up before.
  [[nodiscard]] bool give_up(const Error& why) noexcept;
  void end(abi::Result (*call)(abi::Comm)) noexcept;

  abi::Comm comm_;
  int device_;
  bool blocking_;
  int generation_ = process_generation();
  mutable std::mutex mutex_;  // guards why_, held_ and the end
  std::optional<Error> why_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> captured_{false};
  std::vector<std::weak_ptr<const void>> held_;
};

}  // namespace fastdist::nccl
