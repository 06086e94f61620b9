// Why a communicator cannot be used any more: as data that ranks tell each other, and in words.
//
// Engines decide by the data. What users read about a failure is composed here, for all engines.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/signature.h"

namespace fastdist {

enum class FailureKind : std::uint32_t {
  kDied,
  kLost,         // died, or lost its connection
  kCutOff,       // lost its connection to the rank that noticed it
  kUnreachable,  // together with its machine, whose address is the detail
  kClosed,
  kInterrupted,
  kMalformed,  // sent a malformed message
  kTimeout,
  kDeadlock,           // the detail is that of `describe_waits`
  kDeadlockElsewhere,  // likewise, for ranks of another communicator
  kUnfinished,         // a call on GPUs after its timeout
  kAborted,            // died or aborted while calls on GPUs waited for it
  kError,              // an error with `code`, whose message is the detail
};

struct Failure {
  FailureKind kind{};
  std::vector<int> ranks = {};             // that caused it
  int noticed_by = 0;                      // the first rank that could not go on
  std::chrono::duration<double> waited{};  // by the rank that noticed it
  std::string detail = {};
  ErrorCode code = ErrorCode::kState;  // of kError
};

// The call of a rank that waits for another; none if it is not known to wait.
struct WaitOfRank {
  int rank;
  std::optional<Signature> call{};
  std::optional<int> awaited{};
  std::string site{};         // the caller's line, or ""
  bool is_elsewhere = false;  // in another communicator, whose ranks the call names
};

// The last collective of a rank; its number is 0 if there is none.
struct LastCall {
  int rank;
  std::uint64_t number;
  Signature call;
};

// Returns the code of the errors that other ranks throw.
[[nodiscard]] ErrorCode code_of(const Failure& failure) noexcept;
// Makes the error that rank `rank` throws in `call`.
[[nodiscard]] Error error_in(const Failure& failure, const Signature& call, int rank,
                             std::span<const LastCall> last_calls);
// Makes the error that rank `rank` throws in all later calls.
[[nodiscard]] Error error_after(const Failure& failure, int rank);
// Makes the error for calls after `close`, and in a forked child.
[[nodiscard]] Error error_if_closed(int rank);
[[nodiscard]] Error error_if_forked();

// Describes the waits of a deadlock that rank `rank` of `ranks` has found.
[[nodiscard]] std::string describe_waits(std::span<const WaitOfRank> waits, int rank, int ranks);

// A failure as ranks tell it to each other, in shared memory or over a connection. Longer lists and
// details are cut.
struct FailureRecord {
  std::uint32_t kind;
  std::uint32_t code;
  std::int32_t noticed_by;
  std::uint32_t ranks;  // how many of `failed` are set
  double seconds;
  std::array<std::int32_t, 256> failed;
  std::uint64_t bytes;  // how many of `detail` are set
  std::array<char, 16000> detail;
};

void write(const Failure& failure, FailureRecord& record) noexcept;
// Returns the failure of a record that another rank has written, unless `write` never writes such a
// record for `ranks` ranks.
[[nodiscard]] std::optional<Failure> read(const FailureRecord& record, int ranks);
// Returns the bytes of a record to send, and the record of bytes that have come.
[[nodiscard]] std::string_view bytes_of(const FailureRecord& record) noexcept;
[[nodiscard]] std::optional<Failure> read(std::string_view bytes, int ranks);

// --- calls that differ --------------------------------------------------------------------------

struct CallOfRank {
  Signature signature;
  std::string site;  // the caller's line, or ""
};

// Makes the error that rank `rank` throws for collective number `sequence`; `calls` are by rank.
[[nodiscard]] Error mismatch_of(std::uint64_t sequence, int rank,
                                std::span<const CallOfRank> calls);

// Makes the error for a send and a recv, seen from `rank`.
[[nodiscard]] Error transfer_mismatch_of(std::uint64_t number, int rank, const CallOfRank& own,
                                         int other, const CallOfRank& theirs);

}  // namespace fastdist
