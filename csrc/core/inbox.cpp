#include "core/inbox.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "core/error.h"

namespace fastdist {
namespace {

constexpr std::chrono::microseconds kPause{200};

std::string name_of_tag(std::uint64_t tag) {
  std::string name = "tag ";
  name += std::to_string(tag & ~kObjectTag);
  if ((tag & kObjectTag) != 0) name += " of an object";
  return name;
}

}  // namespace

std::string describe_wait(int rank, std::uint64_t tag, const std::string& source,
                          const std::set<std::uint64_t>& kept) {
  std::string text = "\nrank ";
  text +=
      std::to_string(rank) + " waits for a message with " + name_of_tag(tag) + " from " + source;
  if (kept.empty()) return text;
  text += ", which has sent others that no receive has asked for:";
  for (const std::uint64_t other : kept) (text += ' ') += name_of_tag(other);
  return text;
}

void Receive::finish(int source, std::exception_ptr error) noexcept {
  source_ = source;
  error_ = std::move(error);
  work_->run();
}

void Receive::withdraw() noexcept {
  if (claim()) return finish(-1, std::current_exception());
  while (!is_done()) std::this_thread::sleep_for(kPause);
}

Inbox::Reading::Reading(Inbox& inbox) : inbox_(inbox) {
  const char* reader = nullptr;
  has_begun_ =
      inbox_.reader_.compare_exchange_strong(reader, &this_thread, std::memory_order_acquire);
  if (reader == &this_thread) {
    refuse(ErrorCode::kState, "a signal handler receives from rank ", inbox_.source_,
           " while its thread waits for a message of that rank; set a flag in the handler "
           "and receive later");
  }
}

Inbox::Reading::~Reading() {
  if (has_begun_) inbox_.reader_.store(nullptr, std::memory_order_release);
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
    receives_.remove_if([](const auto& other) { return other->is_claimed(); });
    const auto it = std::find_if(kept_.begin(), kept_.end(),
                                 [&](const Kept& k) { return k.message.tag == receive->tag(); });
    if (it == kept_.end()) {
      receives_.push_back(receive);
      return note_lists();
    }
    if (!receive->claim()) return;
    kept = std::move(*it);
    kept_.erase(it);
    note_lists();
  }
  fill(*receive, kept);
}

void Inbox::receive(TensorView out, std::uint64_t tag, const CallOptions& options) {
  if (is_plain_ && source_ != communicator_.rank()) {  // the usual case, without allocating memory
    const Reading reading(*this);
    if (reading && is_plain_ && await(out, tag, options).tag == tag) {
      return communicator_.recv(out, source_, options);
    }
  }
  const auto receive = std::make_shared<Receive>(out, tag, Fit::kSame);
  add(receive);
  read_until(*receive, options);
}

void Inbox::read_until(Receive& receive, const CallOptions& options) {
  try {
    wait_for(receive, options);
  } catch (...) {
    receive.withdraw();
  }
  receive.work()->wait(std::chrono::nanoseconds(0));
}

void Inbox::wait_for(const Receive& receive, const CallOptions& options) {
  if (receive.is_done()) return;
  options.caller->may_block();
  const bool is_own = source_ == communicator_.rank();  // then another thread sends
  const auto start = Clock::now();
  CallOptions rest = options;
  for (bool is_first = true; !receive.is_done(); is_first = false) {
    communicator_.check_usable();
    rest.timeout = options.timeout - (Clock::now() - start);
    if (rest.timeout.count() <= 0 && !is_first) {
      throw Error(ErrorCode::kTimeout,
                  "rank " + std::to_string(source_) + " has sent no message in time" +
                      other_tags(receive.tag()),
                  {source_});
    }
    if (!is_own) {
      const Reading reading(*this);
      if (reading) {
        if (!receive.is_done()) read(await(receive.out(), receive.tag(), rest), rest);
        continue;
      }
    }
    options.caller->check_interrupt();
    if (is_own && Clock::now() - start > kPollInterval && options.caller->is_alone()) {
      refuse(ErrorCode::kState, "no other thread can send what this rank waits for from itself",
             other_tags(receive.tag()));
    }
    std::this_thread::sleep_for(kPause);
  }
}

Message Inbox::await(TensorView out, std::uint64_t tag, const CallOptions& options) {
  try {
    return communicator_.await_message(source_, out, options);
  } catch (const Error& error) {
    const std::string tags = other_tags(tag);
    if (tags.empty()) throw;
    throw Error(error.code(), error.what() + tags, error.ranks());
  }
}

std::string Inbox::other_tags(std::uint64_t tag) {
  std::set<std::uint64_t> kept;
  add_kept(kept);
  if (tag == 0 && kept.empty()) return "";
  return describe_wait(communicator_.rank(), tag, "rank " + std::to_string(source_), kept);
}

void Inbox::add_kept(std::set<std::uint64_t>& tags) {
  const std::lock_guard lock(mutex_);
  for (const Kept& kept : kept_) tags.insert(kept.message.tag);
}

bool Inbox::read_if_any(const CallOptions& options) {
  const Reading reading(*this);
  if (!reading) return false;
  const std::optional<Message> next = communicator_.find_message(source_);
  if (next) read(*next, options);
  return next.has_value();
}

void Inbox::read(const Message& next, const CallOptions& options) {
  std::shared_ptr<Receive> receive;
  {
    const std::lock_guard lock(mutex_);
    receive = take(next.tag);
    note_lists();
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
    if (receive == nullptr) kept_.push_back(std::move(kept));
    note_lists();
  }
  if (receive != nullptr) fill(*receive, kept);
}

void Inbox::fill(Receive& receive, const Kept& kept) const noexcept {
  const TensorView out = receive.out();
  std::exception_ptr error;
  const bool fits =
      receive.fit() == Fit::kLess
          ? kept.data.size() <= out.bytes()
          : kept.message.dtype == out.dtype && kept.message.count == out.count &&
                kept.message.order == signature_of(rooted(Op::kRecv, source_), {&out, 1}).order;
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
                  " with " + name_of_tag(receive.tag()),
              {source_}));
  }
  receive.finish(source_, error);
}

}  // namespace fastdist
