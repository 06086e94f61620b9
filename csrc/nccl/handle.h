// The owner of an ncclComm and of the reason for its failure. Shared by the communicator, its
// watcher thread, and memory registered with it.
#pragma once

#include <atomic>
#include <functional>
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

// Returns the loaded library's functions; throws if no library is loaded.
[[nodiscard]] const abi::Functions& functions();
// Converts an NCCL result to an Error.
[[nodiscard]] Error to_error(abi::Result result, const std::string& call, abi::Comm comm);

class Handle {
 public:
  using Use = std::unique_lock<std::recursive_timed_mutex>;

  // Takes ownership of `comm`.
  Handle(abi::Comm comm, int device) : comm_(comm), device_(device) {}
  ~Handle() { close(); }

  [[nodiscard]] abi::Comm get() const noexcept { return comm_; }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] bool is_usable() const noexcept {
    return !failed_.load(std::memory_order_acquire) && generation_ == process_generation();
  }
  // Throws the reason if the handle is not usable.
  void check_usable() const;

  // Throws if an NCCL call failed.
  void check(abi::Result result, const char* call) const {
    if (result != abi::kSuccess) throw_failure(result, call);
  }

  // Returns an error that NCCL reported asynchronously, if any; nothing after a failure.
  [[nodiscard]] std::optional<Error> background_error() const;

  // Aborts all pending calls. Every later call throws `why`. Only the first failure has an effect:
  // `tell` is called before any call can see it. NCCL then no longer knows the communicator.
  void fail(const Error& why, const std::function<void()>& tell = {}) noexcept;
  void close() noexcept;
  // From now on a failure of one is a failure of both.
  static void share_failures(const std::shared_ptr<Handle>& one,
                             const std::shared_ptr<Handle>& other);

  // Must be held during each call's use of NCCL. An abort by another thread waits briefly for the
  // call, because NCCL frees what the call uses. A call that waits for other ranks returns only
  // after the abort.
  [[nodiscard]] Use use() { return Use(use_mutex_); }

  // Keeps `memory` alive while the communicator ends, since NCCL may still use it.
  void hold_until_end(const std::shared_ptr<const void>& memory);
  // Records that some rank cannot create symmetric windows, so that no rank uses them.
  void note_no_windows() noexcept { has_windows_ = false; }
  [[nodiscard]] bool has_windows() const noexcept { return has_windows_; }
  // Records that a call is captured in a graph, whose lifetime the user controls.
  void note_capture() noexcept { captured_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] bool is_captured() const noexcept {
    return captured_.load(std::memory_order_relaxed);
  }

 private:
  [[noreturn]] void throw_failure(abi::Result result, const char* call) const;
  // Returns false if the communicator has already failed or is closed.
  [[nodiscard]] bool set_failure(const Error& why, const std::function<void()>& tell = {}) noexcept;
  void end(abi::Result (*call)(abi::Comm)) noexcept;

  abi::Comm comm_;
  int device_;
  int generation_ = process_generation();
  mutable std::mutex mutex_;  // guards failure_, held_ and the end of the communicator
  std::optional<Error> failure_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> captured_{false};
  bool has_windows_ = true;
  std::vector<std::weak_ptr<const void>> held_;
  std::vector<std::weak_ptr<Handle>> others_;  // that share failures
  std::recursive_timed_mutex use_mutex_;
};

}  // namespace fastdist::nccl
