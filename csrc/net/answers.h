// Messages from a lane's receiver back to its sender: acknowledgements of transfers, notices that a
// rank leaves the communicator, and the questions and answers of deadlock detection. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/failure.h"
#include "core/signature.h"

namespace fastdist::net {

// A rank's answer to a transfer: received, or `mismatch` with the call that this rank expected and
// its source line.
struct Acknowledgement {
  std::uint64_t number = 0;
  bool is_mismatch = false;
  Signature signature{};
  std::string site;
};

enum class AnswerKind : std::uint32_t {
  kReceived,
  kMismatch,
  kClosed,
  kFailure,
  kQuestion,
  kState,
  kDeadlock
};

// Identifies a collective of a rank, or another call after so many collectives.
struct CallHead {
  std::uint64_t sequence = 0;
  std::uint64_t signature = 0;
  std::uint64_t count = 0;
  std::uint64_t list = 0;
  [[nodiscard]] Signature call() const noexcept { return unpack_signature(signature, count, list); }
};

// The beginning of the reply of a waiting rank to a question; see deadlock.cpp. Then follow the
// numbers of sends to and receives from each rank, the ids of the waits that a rank depends on in
// another communicator, and the caller's line.
struct State {
  CallHead head;         // of the call in which the rank waits
  std::uint64_t id;      // of the wait; 0 if the process may make other calls before the wait ends
  std::uint32_t number;  // of the transfer, if the rank waits in one
  std::uint32_t ranks;
  std::uint32_t is_alone;  // no other call of the rank is pending
  std::uint32_t is_elsewhere;
  std::uint32_t awaited;
  std::uint32_t unused;
};

inline constexpr std::size_t kMostAwaited = 64;

struct Waiting {
  State state;
  std::vector<std::uint32_t> sent, received;  // by rank
  std::vector<std::uint64_t> awaited;         // waits in another communicator
  std::string site;
};

[[nodiscard]] std::string serialize(const Waiting& waiting);
// Reads a reply in a communicator of `ranks` ranks; returns nothing if `text` is not one.
[[nodiscard]] std::optional<Waiting> parse(const std::string& text, std::size_t ranks);

// Reads the answers of one peer.
class AnswerReader {
 public:
  AnswerReader(int fd, int ranks) : fd_(fd), ranks_(ranks) {}

  // Reads what has arrived, without waiting.
  void poll();
  // Returns the latest answer to a transfer.
  [[nodiscard]] Acknowledgement last() const { return locked(last_); }
  // The peer has closed the communicator.
  [[nodiscard]] bool has_closed() const { return locked(closed_); }
  // The peer has closed the connection: it has closed the communicator, or has died.
  [[nodiscard]] bool has_ended() const { return locked(ended_); }
  // Returns why the peer gave up, if it did.
  [[nodiscard]] std::optional<Failure> failure() const { return locked(failure_); }
  // Returns, once, the number of the peer's latest question about this rank's state.
  [[nodiscard]] std::optional<std::uint64_t> take_question();
  // True if the peer has answered question `number` or a later one.
  [[nodiscard]] bool has_answered(std::uint64_t number) const;
  // Returns that answer; nothing also if it was cut, as those of very many ranks are.
  [[nodiscard]] std::optional<Waiting> state(std::uint64_t number) const;
  // Returns the peer's description of a deadlock that includes wait `id`, if it has found one.
  [[nodiscard]] std::optional<std::string> deadlock_of(std::uint64_t id) const;

 private:
  void parse();
  template <class T>
  T locked(const T& value) const {
    const std::lock_guard lock(mutex_);
    return value;
  }

  int fd_;
  int ranks_;
  mutable std::mutex mutex_;
  std::vector<std::byte> buffer_;
  Acknowledgement last_;
  bool closed_ = false;
  bool ended_ = false;
  std::optional<Failure> failure_;
  std::optional<std::uint64_t> question_;
  std::uint64_t state_number_ = 0;
  std::optional<Waiting> state_;
  std::uint64_t stuck_ = 0;  // a wait that is part of `deadlock_`
  std::string deadlock_;
};

// Writes answers to one peer.
class AnswerWriter {
 public:
  explicit AnswerWriter(int fd) : fd_(fd) {}

  void acknowledge(const Acknowledgement& answer) noexcept;
  void tell_failure(const Failure& failure) noexcept;
  // Writes an answer of another kind: the number is that of a question, or the id of a wait.
  void tell(AnswerKind kind, std::uint64_t number = 0, std::string_view text = "") noexcept;

 private:
  void write(const std::vector<std::byte>& message) noexcept;

  int fd_;
  std::mutex mutex_;
};

}  // namespace fastdist::net
