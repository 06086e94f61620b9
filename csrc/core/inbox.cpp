#include "core/inbox.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"

namespace fastdist {

void Receive::finish(int source, std::exception_ptr error) noexcept {
  source_ = source;
  error_ = std::move(error);
  work_->run();
}

std::shared_ptr<Receive> Inbox::take(std::uint64_t tag) {
  for (auto it = receives_.begin(); it != receives_.end();) {
    const std::shared_ptr<Receive> receive = *it;
    const bool is_ours = receive->tag() == tag && receive->claim();
    if (!is_ours && !receive->is_claimed()) {
      ++it;
      continue;
    }
    it = receives_.erase(it);  // also what another inbox has ended
    if (is_ours) return receive;
  }
  return nullptr;
}

void Inbox::add(const std::shared_ptr<Receive>& receive) {
  Kept kept;
  {
    const std::lock_guard lock(mutex_);
    const auto it = std::find_if(kept_.begin(), kept_.end(),
                                 [&](const Kept& k) { return k.message.tag == receive->tag(); });
    if (it == kept_.end()) {
      receives_.remove_if([](const auto& other) { return other->is_claimed(); });
      receives_.push_back(receive);
      return;
    }
    if (!receive->claim()) return;
    kept = std::move(*it);
    kept_.erase(it);
  }
  fill(*receive, kept);
}

void Inbox::read_until(const Receive& end, const CallOptions& options) {
  options.caller->may_block();
  const TensorView out = end.out();
  const Signature call = signature_of(rooted(Op::kRecv, source_), {&out, 1});
  while (!end.is_done()) {
    const std::lock_guard lock(reading_);
    if (end.is_done()) return;
    read(communicator_.await_message(source_, call, options), options);
  }
}

bool Inbox::read_if_any(const CallOptions& options) {
  const std::unique_lock lock(reading_, std::try_to_lock);
  if (!lock) return false;
  const std::optional<Message> next = communicator_.find_message(source_);
  if (next) read(*next, options);
  return next.has_value();
}

void Inbox::read(const Message& next, const CallOptions& options) {
  std::shared_ptr<Receive> receive;
  {
    const std::lock_guard lock(mutex_);
    receive = take(next.tag);
  }
  if (receive == nullptr) {
    Kept kept{next, std::vector<std::byte>(next.count * size_of(next.dtype))};
    communicator_.recv({kept.data.data(), next.count, next.dtype, 0}, source_, options);
    return put(std::move(kept));
  }
  std::exception_ptr error;
  try {
    const bool fits = next.count * size_of(next.dtype) <= receive->out().bytes();
    // Where the message does not fit, the engine tells both ranks.
    communicator_.recv(
        fits ? TensorView{receive->out().data, next.count, next.dtype, 0} : receive->out(), source_,
        options);
  } catch (...) {
    error = std::current_exception();
  }
  receive->finish(source_, error);
}

void Inbox::put(TensorView message, std::uint64_t tag) {
  put(Kept{{message.dtype, message.count, tag}, {message.data, message.data + message.bytes()}});
}

void Inbox::put(Kept kept) {
  std::shared_ptr<Receive> receive;
  {
    const std::lock_guard lock(mutex_);
    receive = take(kept.message.tag);
    if (receive == nullptr) kept_.push_back(std::move(kept));
  }
  if (receive != nullptr) fill(*receive, kept);
}

void Inbox::fill(Receive& receive, const Kept& kept) const noexcept {
  const TensorView out = receive.out();
  std::exception_ptr error;
  if (kept.data.size() <= out.bytes()) {
    if (!kept.data.empty()) std::memcpy(out.data, kept.data.data(), kept.data.size());
  } else {
    const auto text = [](DType dtype, std::uint64_t count) {
      return std::string(name_of(dtype)) + " × " + std::to_string(count);
    };
    error = std::make_exception_ptr(
        Error(ErrorCode::kMismatch,
              "send and recv do not match: rank " + std::to_string(source_) + " has sent " +
                  text(kept.message.dtype, kept.message.count) + ", rank " +
                  std::to_string(communicator_.rank()) + " receives " + text(out.dtype, out.count) +
                  " with tag " + std::to_string(receive.tag()),
              {source_}));
  }
  receive.finish(source_, error);
}

}  // namespace fastdist
