#include "net/answers.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace fastdist::net {
namespace {

enum class Kind : std::uint32_t {
  kReceived,
  kMismatch,
  kClosed,
  kFailure,
  kQuestion,
  kState,
  kDeadlock
};

// Precedes each message; `bytes` bytes of text or of a FailureRecord follow.
struct Head {
  Kind kind{};
  std::uint32_t bytes = 0;
  std::uint64_t number = 0;     // of the transfer, the question or the wait
  std::uint64_t signature = 0;  // of a mismatch, packed
  std::uint64_t count = 0;
};

constexpr std::size_t kLongestText = 4096;

// True for a head that an AnswerWriter may write.
bool is_valid(const Head& head) {
  return head.kind <= Kind::kDeadlock &&
         head.bytes <= (head.kind == Kind::kFailure ? sizeof(FailureRecord) : kLongestText);
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
      case Kind::kReceived:
      case Kind::kMismatch:
        last_ = {head.number, head.kind == Kind::kMismatch,
                 unpack_signature(head.signature, head.count, 0), text};
        break;
      case Kind::kClosed:
        closed_ = true;
        break;
      case Kind::kFailure:
        if (!failure_) failure_ = read(text, ranks_);
        if (!failure_) ended_ = true;
        break;
      case Kind::kQuestion:
        question_ = head.number;
        break;
      case Kind::kState:
        state_number_ = head.number;
        state_ = text;
        break;
      case Kind::kDeadlock:
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

std::optional<std::string> AnswerReader::state(std::uint64_t number) const {
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
  write(compose({.kind = answer.is_mismatch ? Kind::kMismatch : Kind::kReceived,
                 .number = answer.number,
                 .signature = answer.signature.packed(),
                 .count = answer.signature.count},
                cut(answer.site)));
}

void AnswerWriter::tell_closed() noexcept { write(compose({.kind = Kind::kClosed})); }

void AnswerWriter::tell_failure(const Failure& failure) noexcept {
  FailureRecord record{};
  fastdist::write(failure, record);
  write(compose({.kind = Kind::kFailure}, bytes_of(record)));
}

void AnswerWriter::ask(std::uint64_t number) noexcept {
  write(compose({.kind = Kind::kQuestion, .number = number}));
}

void AnswerWriter::tell_state(std::uint64_t number, const std::string& state) noexcept {
  write(compose({.kind = Kind::kState, .number = number}, cut(state)));
}

void AnswerWriter::tell_deadlock(std::uint64_t id, const std::string& detail) noexcept {
  write(compose({.kind = Kind::kDeadlock, .number = id}, cut(detail)));
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

}  // namespace fastdist::net
