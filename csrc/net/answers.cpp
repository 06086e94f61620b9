#include "net/answers.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace fastdist::net {
namespace {

// Precedes each message; `bytes` bytes of text or of a FailureRecord follow.
struct Head {
  AnswerKind kind{};
  std::uint32_t bytes = 0;
  std::uint64_t number = 0;     // of the transfer, the question or the wait
  std::uint64_t signature = 0;  // of a mismatch, packed
  std::uint64_t count = 0;
};

constexpr std::size_t kLongestText = 4096;

bool is_valid(const Head& head) {
  return head.kind <= AnswerKind::kDeadlock &&
         head.bytes <= (head.kind == AnswerKind::kFailure ? sizeof(FailureRecord) : kLongestText);
}

constexpr int kWritePatienceMs = 200;

std::string_view cut(std::string_view text) { return text.substr(0, kLongestText); }

std::vector<std::byte> compose(Head head, std::string_view text = "") {
  head.bytes = static_cast<std::uint32_t>(text.size());
  std::vector<std::byte> message(sizeof(Head) + text.size());
  std::memcpy(message.data(), &head, sizeof(Head));
  std::memcpy(message.data() + sizeof(Head), text.data(), text.size());
  return message;
}

}  // namespace

void AnswerReader::poll() {
  const std::lock_guard lock(mutex_);
  while (!ended_) {
    std::array<std::byte, 4096> part;
    const ssize_t n = ::recv(fd_, part.data(), part.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      ended_ = true;
    } else {
      buffer_.insert(buffer_.end(), part.begin(), part.begin() + n);
    }
  }
  parse();
}

void AnswerReader::parse() {
  std::size_t at = 0;
  while (buffer_.size() - at >= sizeof(Head)) {
    Head head;
    std::memcpy(&head, buffer_.data() + at, sizeof(Head));
    if (!is_valid(head)) {
      ended_ = true;
      return;
    }
    if (buffer_.size() - at < sizeof(Head) + head.bytes) break;
    const std::string text(reinterpret_cast<const char*>(buffer_.data()) + at + sizeof(Head),
                           head.bytes);
    at += sizeof(Head) + head.bytes;
    switch (head.kind) {
      case AnswerKind::kReceived:
      case AnswerKind::kMismatch:
        last_ = {head.number, head.kind == AnswerKind::kMismatch,
                 unpack_signature(head.signature, head.count, 0), text};
        break;
      case AnswerKind::kClosed:
        closed_ = true;
        break;
      case AnswerKind::kFailure:
        if (!failure_) failure_ = read(text, ranks_);
        if (!failure_) ended_ = true;
        break;
      case AnswerKind::kQuestion:
        question_ = head.number;
        break;
      case AnswerKind::kState:
        state_number_ = head.number;
        state_ = net::parse(text, static_cast<std::size_t>(ranks_));
        break;
      case AnswerKind::kDeadlock:
        stuck_ = head.number;
        deadlock_ = text;
        break;
    }
  }
  buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(at));
}

std::optional<std::uint64_t> AnswerReader::take_question() {
  const std::lock_guard lock(mutex_);
  return std::exchange(question_, std::nullopt);
}

bool AnswerReader::has_answered(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return state_number_ >= number;
}

std::optional<Waiting> AnswerReader::state(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  if (state_number_ < number) return std::nullopt;
  return state_;
}

std::optional<std::string> AnswerReader::deadlock_of(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  if (stuck_ != id) return std::nullopt;
  return deadlock_;
}

void AnswerWriter::acknowledge(const Acknowledgement& answer) noexcept {
  write(compose({.kind = answer.is_mismatch ? AnswerKind::kMismatch : AnswerKind::kReceived,
                 .number = answer.number,
                 .signature = answer.signature.packed(),
                 .count = answer.signature.count},
                cut(answer.site)));
}

void AnswerWriter::tell_failure(const Failure& failure) noexcept {
  FailureRecord record{};
  fastdist::write(failure, record);
  write(compose({.kind = AnswerKind::kFailure}, bytes_of(record)));
}

void AnswerWriter::tell(AnswerKind kind, std::uint64_t number, std::string_view text) noexcept {
  write(compose({.kind = kind, .number = number}, cut(text)));
}

// A peer reads its answers whenever it waits, so the kernel's buffer has room for them.
void AnswerWriter::write(const std::vector<std::byte>& message) noexcept {
  const std::lock_guard lock(mutex_);
  for (std::size_t at = 0; at < message.size();) {
    const ssize_t n =
        ::send(fd_, message.data() + at, message.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      at += static_cast<std::size_t>(n);
      continue;
    }
    if (errno == EINTR) continue;
    pollfd state{fd_, POLLOUT, 0};
    if (errno != EAGAIN || ::poll(&state, 1, kWritePatienceMs) <= 0) return;
  }
}

// --- states -------------------------------------------------------------------------------------

std::string serialize(const Waiting& waiting) {
  std::string text(reinterpret_cast<const char*>(&waiting.state), sizeof(State));
  const auto add = [&text](const auto& numbers) {
    text.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(numbers[0]));
  };
  add(waiting.sent);
  add(waiting.received);
  add(waiting.awaited);
  return text + waiting.site;
}

std::optional<Waiting> parse(const std::string& text, std::size_t ranks) {
  Waiting waiting;
  const State& state = waiting.state;
  if (text.size() < sizeof(State)) return std::nullopt;
  std::memcpy(&waiting.state, text.data(), sizeof(State));
  if (state.ranks != ranks || state.awaited > kMostAwaited ||
      text.size() < sizeof(State) + 2 * ranks * sizeof(std::uint32_t) +
                        state.awaited * sizeof(std::uint64_t)) {
    return std::nullopt;
  }
  const char* at = text.data() + sizeof(State);
  const auto take = [&at](auto& numbers, std::size_t count) {
    numbers.resize(count);
    const std::size_t bytes = count * sizeof(numbers[0]);
    if (bytes != 0) std::memcpy(numbers.data(), at, bytes);
    at += bytes;
  };
  take(waiting.sent, ranks);
  take(waiting.received, ranks);
  take(waiting.awaited, state.awaited);
  waiting.site.assign(at, text.data() + text.size());
  return waiting;
}

}  // namespace fastdist::net
