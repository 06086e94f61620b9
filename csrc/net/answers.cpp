#include "net/answers.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace fastdist::net {
namespace {

enum class Kind : std::uint32_t { kReceived, kMismatch, kClosed, kFailure, kQuestion, kState };

// Precedes each answer; `bytes` of text follow.
struct Head {
  Kind kind;
  std::uint32_t bytes;
  std::uint64_t number;     // of the transfer
  std::uint64_t signature;  // of a mismatch, packed
  std::uint64_t count;
  std::uint32_t code;   // of a failure
  std::uint32_t ranks;  // how many of `failed` are set
  std::array<std::int32_t, 16> failed;
};

constexpr std::size_t kLongestText = 4096;

// True for a head that an AnswerWriter of a communicator of `ranks` ranks may write.
bool is_valid(const Head& head, int ranks) {
  const auto is_rank = [ranks](int p) { return p >= 0 && p < ranks; };
  return head.kind <= Kind::kState && head.bytes <= kLongestText &&
         head.code <= static_cast<std::uint32_t>(ErrorCode::kState) &&
         head.ranks <= head.failed.size() &&
         std::all_of(head.failed.begin(), head.failed.begin() + head.ranks, is_rank);
}

constexpr int kWritePatienceMs = 200;

std::vector<std::byte> compose(Head head, const std::string& text) {
  const std::size_t bytes = std::min(text.size(), kLongestText);
  head.bytes = static_cast<std::uint32_t>(bytes);
  std::vector<std::byte> message(sizeof(Head) + bytes);
  std::memcpy(message.data(), &head, sizeof(Head));
  std::memcpy(message.data() + sizeof(Head), text.data(), bytes);
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
    if (!is_valid(head, ranks_)) {
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
        if (!failure_) {
          failure_.emplace(static_cast<ErrorCode>(head.code), text,
                           std::vector<int>(head.failed.begin(), head.failed.begin() + head.ranks));
        }
        break;
      case Kind::kQuestion:
        question_ = head.number;
        break;
      case Kind::kState:
        state_number_ = head.number;
        state_ = text;
        break;
    }
  }
  buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(at));
}

Acknowledgement AnswerReader::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

bool AnswerReader::has_closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

bool AnswerReader::has_ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

std::optional<Error> AnswerReader::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
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

void AnswerWriter::acknowledge(const Acknowledgement& answer) noexcept {
  Head head{};
  head.kind = answer.is_mismatch ? Kind::kMismatch : Kind::kReceived;
  head.number = answer.number;
  head.signature = answer.signature.packed();
  head.count = answer.signature.count;
  write(compose(head, answer.site));
}

void AnswerWriter::tell_closed() noexcept {
  Head head{};
  head.kind = Kind::kClosed;
  write(compose(head, ""));
}

void AnswerWriter::tell_failure(const Error& error) noexcept {
  Head head{};
  head.kind = Kind::kFailure;
  head.code = static_cast<std::uint32_t>(error.code());
  head.ranks = static_cast<std::uint32_t>(std::min(error.ranks().size(), head.failed.size()));
  std::copy_n(error.ranks().begin(), head.ranks, head.failed.begin());
  write(compose(head, error.what()));
}

void AnswerWriter::ask(std::uint64_t number) noexcept {
  Head head{};
  head.kind = Kind::kQuestion;
  head.number = number;
  write(compose(head, ""));
}

void AnswerWriter::tell_state(std::uint64_t number, const std::string& state) noexcept {
  Head head{};
  head.kind = Kind::kState;
  head.number = number;
  write(compose(head, state));
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
