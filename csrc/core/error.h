// The exception of the C++ core; the bindings map its code to a Python exception.
#pragma once

#include <cerrno>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fastdist {

enum class ErrorCode {
  kValue,        // ValueError
  kType,         // TypeError
  kIndex,        // IndexError
  kMismatch,     // CollectiveMismatchError
  kPeerFailure,  // PeerFailureError
  kTimeout,      // CollectiveTimeoutError
  kUnsupported,  // UnsupportedError
  kMemory,       // MemoryError
  kSystem,       // OSError
  kState,        // FastdistError: the communicator is closed or was aborted
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, std::vector<int> ranks = {})
      : std::runtime_error(message), code_(code), ranks_(std::move(ranks)) {}

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }
  // The ranks that caused the error, if any.
  [[nodiscard]] const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  ErrorCode code_;
  std::vector<int> ranks_;
};

// Throws an Error whose message is `parts`, one after another. Not inlined into fast callers.
template <class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void refuse(ErrorCode code, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(code, message.str());
}

// Makes an Error of `message` followed by the text of errno.
[[nodiscard]] inline Error system_error(const std::string& message) {
  return {ErrorCode::kSystem, message + ": " + std::strerror(errno)};
}

}  // namespace fastdist
