#include "core/inbox.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"

namespace fastdist {
namespace {

constexpr std::chrono::microseconds kPause{200};

}  // namespace

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
    is_plain_ = false;
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

Signature Inbox::call_of(TensorView out) const {
  return signature_of(rooted(Op::kRecv, source_), {&out, 1});
}

void Inbox::receive(TensorView out, std::uint64_t tag, const CallOptions& options) {
  {
    const std::unique_lock lock(reading_, std::try_to_lock);
    if (lock && is_plain_) {  // the usual case, without allocating memory
      const Message next = await(call_of(out), tag, options);
      if (next.tag == tag) return communicator_.recv(out, source_, options);
    }
  }
  const auto receive = std::make_shared<Receive>(out, tag, Fit::kSame);
  add(receive);
  read_until(*receive, options);
  receive->work()->wait(std::chrono::nanoseconds(0));
}

void Inbox::read_until(const Receive& end, const CallOptions& options) {
  options.caller->may_block();
  const Signature call = call_of(end.out());
  const auto start = std::chrono::steady_clock::now();
  while (!end.is_done()) {
    const std::unique_lock lock(reading_, std::try_to_lock);
    if (lock) {
      if (!end.is_done()) read(await(call, end.tag(), options), options);
      continue;
    }
    // Another thread reads, and ends this receive or leaves the rest to this one.
    options.caller->check_interrupt();
    if (std::chrono::steady_clock::now() - start > options.timeout) {
      throw Error(ErrorCode::kTimeout,
                  "rank " + std::to_string(source_) + " has sent no message in time" +
                      other_tags(end.tag()),
                  {source_});
    }
    std::this_thread::sleep_for(kPause);
  }
}

Message Inbox::await(const Signature& call, std::uint64_t tag, const CallOptions& options) {
  try {
    return communicator_.await_message(source_, call, options);
  } catch (const Error& error) {
    const std::string tags = other_tags(tag);
    if (tags.empty()) throw;
    throw Error(error.code(), error.what() + tags, error.ranks());
  }
}

std::string Inbox::other_tags(std::uint64_t tag) {
  const std::lock_guard lock(mutex_);
  if (tag == 0 && kept_.empty()) return "";
  std::string text = "\nrank " + std::to_string(communicator_.rank()) +
                     " waits for a message with tag " + std::to_string(tag) + " from rank " +
                     std::to_string(source_);
  if (kept_.empty()) return text;
  text += ", which has sent others that no receive has asked for:";
  std::set<std::uint64_t> tags;
  for (const Kept& kept : kept_) tags.insert(kept.message.tag);
  for (const std::uint64_t other : tags) text += " tag " + std::to_string(other);
  return text;
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
    communicator_.recv({kept.data.data(), next.count, next.dtype, next.order}, source_, options);
    return put(std::move(kept));
  }
  std::exception_ptr error;
  try {
    const bool fits =
        receive->fit() == Fit::kLess && next.count * size_of(next.dtype) <= receive->out().bytes();
    // Where the message does not fit, the engine tells both ranks.
    communicator_.recv(
        fits ? TensorView{receive->out().data, next.count, next.dtype, next.order} : receive->out(),
        source_, options);
  } catch (...) {
    error = std::current_exception();
  }
  receive->finish(source_, error);
}

void Inbox::put(TensorView message, std::uint64_t tag) {
  put(Kept{{message.dtype, message.count, message.order, tag},
           {message.data, message.data + message.bytes()}});
}

void Inbox::put(Kept kept) {
  std::shared_ptr<Receive> receive;
  {
    const std::lock_guard lock(mutex_);
    receive = take(kept.message.tag);
    if (receive == nullptr) {
      is_plain_ = false;
      kept_.push_back(std::move(kept));
    }
  }
  if (receive != nullptr) fill(*receive, kept);
}

void Inbox::fill(Receive& receive, const Kept& kept) const noexcept {
  const TensorView out = receive.out();
  std::exception_ptr error;
  const bool fits = receive.fit() == Fit::kLess
                        ? kept.data.size() <= out.bytes()
                        : kept.message.dtype == out.dtype && kept.message.count == out.count &&
                              kept.message.order == call_of(out).order;
  if (fits) {
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
