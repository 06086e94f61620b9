// Comparison of the calls of GPU ranks through their hosts; see nccl::Checker.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "bindings/endpoint.h"
#include "nccl/engine.h"

namespace fastdist::bindings {

// Compares calls in the queue of a host communicator of the same ranks, so in one order with that
// communicator's own calls. Create and destroy it with the GIL held.
class HostChecker final : public nccl::Checker {
 public:
  explicit HostChecker(py::object hosts)
      : owner_(std::move(hosts)), hosts_(owner_.cast<Endpoint&>()) {}

  void on_failure(Fail fail) override;
  bool agree(const Signature& signature, bool flag, const CallOptions& options) override;
  void compare_later(const Signature& signature, const CallOptions& options) override;
  bool settle(std::chrono::nanoseconds limit) noexcept override;
  [[nodiscard]] std::optional<int> find_lost() const override {
    return hosts_.communicator().find_lost();
  }

  // Returns the last comparison of `compare_later`.
  [[nodiscard]] std::shared_ptr<Work> last() const {
    const std::lock_guard lock(mutex_);
    return last_;
  }
  [[nodiscard]] Endpoint& hosts() noexcept { return hosts_; }

 private:
  // Shared with queued comparisons, which may outlive this object.
  struct State {
    Fail fail;
    std::atomic<bool> has_failed{false};

    void report(const Error& error, const std::function<void()>& tell) {
      if (!has_failed.exchange(true)) fail(error, tell);
    }
  };

  py::object owner_;
  Endpoint& hosts_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  mutable std::mutex mutex_;  // guards last_
  std::shared_ptr<Work> last_;
  int generation_ = process_generation();
};

}  // namespace fastdist::bindings
