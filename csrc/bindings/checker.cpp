#include "bindings/checker.h"

#include <chrono>
#include <utility>

namespace fastdist::bindings {
namespace {

bool compare(BlockingCommunicator& hosts, const Signature& signature, bool flag,
             CallOptions options) {
  std::byte answer{static_cast<unsigned char>(flag ? 1 : 0)};
  const TensorView view{&answer, 1, DType::kUInt8, 0};
  options.whole = &signature;
  hosts.all_reduce({&view, 1}, {&view, 1}, ReduceOp::kMin, options);
  return answer != std::byte{0};
}

}  // namespace

void HostChecker::on_failure(Fail fail) {
  state_->fail = std::move(fail);
  hosts_.on_mismatch([weak = std::weak_ptr(state_)](const Error& error) {
    if (const auto state = weak.lock()) state->report(error, {});
  });
}

bool HostChecker::agree(const Signature& signature, bool flag, const CallOptions& options) {
  bool result = false;
  hosts_.run_without_gil(
      [&](BlockingCommunicator& c, const CallOptions& each) {
        result = compare(c, signature, flag, each);
      },
      options);
  return result;
}

void HostChecker::compare_later(const Signature& signature, const CallOptions& options) {
  auto work = hosts_.run_soon(
      [&hosts = hosts_, state = state_, signature](BlockingCommunicator& c,
                                                   const CallOptions& each) {
        if (state->has_failed) return;
        try {
          (void)compare(c, signature, true, each);
        } catch (const Error& error) {
          state->report(error, [&] { hosts.tell_next(error); });
        }
      },
      options);
  const std::lock_guard lock(mutex_);
  last_ = std::move(work);
}

bool HostChecker::settle(std::chrono::nanoseconds limit) noexcept {
  if (generation_ != process_generation()) return true;
  try {
    const auto work = last();
    return work == nullptr || work->wait(limit);
  } catch (...) {  // no memory: the comparison has ended
    return true;
  }
}

}  // namespace fastdist::bindings
