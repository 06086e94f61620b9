#include "core/failure.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

namespace fastdist {
namespace {

constexpr std::size_t kHeadBytes = offsetof(FailureRecord, detail);
constexpr double kMostSeconds = 1e9;

std::string name(int rank) { return "rank " + std::to_string(rank); }

std::string text_of(std::chrono::duration<double> time) {
  std::array<char, 32> text;
  return std::string(text.data(),
                     std::to_chars(text.data(), text.data() + text.size(), time.count()).ptr) +
         " s";
}

std::string list_ranks(std::span<const int> ranks) {
  std::string text;
  for (const int p : ranks) text += (text.empty() ? "" : ", ") + std::to_string(p);
  return text;
}

std::string describe(std::span<const LastCall> calls) {
  if (calls.empty()) return "";
  std::string text = "; last collective of each rank:";
  for (const LastCall& last : calls) {
    text += "\n  " + name(last.rank) + ": ";
    text += last.number == 0 ? "none"
                             : "call " + std::to_string(last.number) + ", " + describe(last.call);
  }
  return text;
}

bool is_deadlock(FailureKind kind) {
  return kind == FailureKind::kDeadlock || kind == FailureKind::kDeadlockElsewhere;
}

// Describes a failure for rank `rank`, without the call that it ended.
std::string describe(const Failure& failure, int rank) {
  const auto& [kind, ranks, noticed_by, waited, detail, code] = failure;
  const bool is_own = noticed_by == rank;
  const bool is_known = is_own || std::ranges::find(ranks, noticed_by) != ranks.end();
  const std::string noticed = is_known ? "" : " (noticed by " + name(noticed_by) + ")";
  const std::string who = "rank " + list_ranks(ranks);
  switch (kind) {
    case FailureKind::kDied:
      return who + " has died" + noticed;
    case FailureKind::kLost:
      return who + " has died or lost its connection" + noticed;
    case FailureKind::kCutOff:
      return who + " has lost the connection to " + (is_own ? "this rank" : name(noticed_by));
    case FailureKind::kUnreachable:
      return "the machine " + detail + " of " + who + " cannot be reached" + noticed;
    case FailureKind::kClosed:
      return who + " has closed the communicator" + noticed;
    case FailureKind::kInterrupted:
      return (is_own ? "this rank" : who) + " was interrupted";
    case FailureKind::kMalformed:
      return who + " has sent a malformed header" + noticed;
    case FailureKind::kTimeout:
      return is_own ? who + " did not come in time"
                    : name(noticed_by) + " gave up waiting for " + who;
    case FailureKind::kDeadlock:
    case FailureKind::kDeadlockElsewhere:
      return "ranks wait for each other, and none of their calls can end" +
             std::string(kind == FailureKind::kDeadlock
                             ? ""
                             : ", by their numbers in another communicator") +
             detail;
    case FailureKind::kUnfinished:
      return "a call on GPUs has not finished";
    case FailureKind::kAborted:
      return who +
             " has died or aborted while calls on GPUs waited for it; the communicator was "
             "aborted";
    case FailureKind::kError:
      return detail + noticed;
  }
  return detail;
}

Error error_of(const Failure& failure, const std::string& text, int rank) {
  const bool is_interrupted = failure.kind == FailureKind::kInterrupted;
  std::vector<int> ranks = failure.ranks;
  if (is_interrupted || is_deadlock(failure.kind)) std::erase(ranks, rank);
  const bool is_own = is_interrupted && failure.noticed_by == rank;
  return {is_own ? ErrorCode::kState : code_of(failure), text, std::move(ranks)};
}

}  // namespace

ErrorCode code_of(const Failure& failure) noexcept {
  const FailureKind kind = failure.kind;
  if (kind == FailureKind::kError) return failure.code;
  if (is_deadlock(kind)) return ErrorCode::kMismatch;
  const bool is_late = kind == FailureKind::kTimeout || kind == FailureKind::kUnfinished;
  return is_late ? ErrorCode::kTimeout : ErrorCode::kPeerFailure;
}

Error error_in(const Failure& failure, const Signature& call, int rank,
               std::span<const LastCall> last_calls) {
  const std::string where = " on " + name(rank);
  std::string text = describe(failure, rank);
  if (failure.kind == FailureKind::kUnfinished) {
    text = describe(call) + " has not finished" + where + " within " + text_of(failure.waited) +
           ": a rank has not called it, is late or has died; the communicator was aborted";
  } else if (failure.kind == FailureKind::kTimeout && failure.noticed_by == rank) {
    const auto rounded =
        std::chrono::round<std::chrono::duration<std::int64_t, std::deci>>(failure.waited);
    text = describe(call) + where + " reached its timeout after " + text_of(rounded) +
           " waiting for rank " + list_ranks(failure.ranks) + describe(last_calls);
  } else if (!is_deadlock(failure.kind)) {
    text = describe(call) + where + ": " + text + describe(last_calls);
  }
  return error_of(failure, text, rank);
}

Error error_after(const Failure& failure, int rank) {
  return error_of(failure,
                  "the communicator cannot be used any more on " + name(rank) +
                      ", make a new one: in an earlier call, " + describe(failure, rank),
                  rank);
}

Error error_if_closed(int rank) {
  return {ErrorCode::kState, "the communicator is closed on " + name(rank)};
}

Error error_if_forked() {
  return {ErrorCode::kState,
          "the communicator belongs to the parent process; a forked child cannot use it"};
}

std::string describe_waits(std::span<const WaitOfRank> waits, int rank, int ranks) {
  std::string text = " (seen from " + name(rank) + " of " + std::to_string(ranks) + "):";
  for (const WaitOfRank& wait : waits) {
    text += "\n  " + name(wait.rank) + ": ";
    text += wait.call ? describe(*wait.call) : "not waiting yet";
    if (wait.is_elsewhere) text += " in another communicator";
    if (wait.awaited) text += ", for " + name(*wait.awaited);
    if (!wait.site.empty()) text += " at " + wait.site;
  }
  return text;
}

void write(const Failure& failure, FailureRecord& record) noexcept {
  record.kind = static_cast<std::uint32_t>(failure.kind);
  record.code = static_cast<std::uint32_t>(failure.code);
  record.noticed_by = failure.noticed_by;
  record.seconds = std::clamp(failure.waited.count(), 0.0, kMostSeconds);
  record.ranks = static_cast<std::uint32_t>(std::min(failure.ranks.size(), record.failed.size()));
  std::copy_n(failure.ranks.begin(), record.ranks, record.failed.begin());
  record.bytes = std::min(failure.detail.size(), record.detail.size());
  std::copy_n(failure.detail.begin(), record.bytes, record.detail.begin());
}

std::optional<Failure> read(const FailureRecord& record, int ranks) {
  const auto is_rank = [ranks](int p) { return p >= 0 && p < ranks; };
  if (record.kind > static_cast<std::uint32_t>(FailureKind::kError) ||
      record.code > static_cast<std::uint32_t>(ErrorCode::kState) || !is_rank(record.noticed_by) ||
      !(record.seconds >= 0 && record.seconds <= kMostSeconds) ||
      record.ranks > record.failed.size() || record.bytes > record.detail.size()) {
    return std::nullopt;
  }
  const std::span failed(record.failed.data(), record.ranks);
  if (!std::ranges::all_of(failed, is_rank)) return std::nullopt;
  return Failure{static_cast<FailureKind>(record.kind),
                 {failed.begin(), failed.end()},
                 record.noticed_by,
                 std::chrono::duration<double>(record.seconds),
                 {record.detail.data(), static_cast<std::size_t>(record.bytes)},
                 static_cast<ErrorCode>(record.code)};
}

std::string_view bytes_of(const FailureRecord& record) noexcept {
  return {reinterpret_cast<const char*>(&record),
          kHeadBytes + static_cast<std::size_t>(record.bytes)};
}

std::optional<Failure> read(std::string_view bytes, int ranks) {
  FailureRecord record;
  if (bytes.size() < kHeadBytes || bytes.size() > sizeof(record)) return std::nullopt;
  std::memcpy(&record, bytes.data(), bytes.size());
  if (record.bytes != bytes.size() - kHeadBytes) return std::nullopt;
  return read(record, ranks);
}

// --- calls that differ --------------------------------------------------------------------------

namespace {

std::string line(int rank, const CallOfRank& call) {
  return "\n  rank " + std::to_string(rank) + ": " + describe(call.signature) +
         (call.site.empty() ? "" : " at " + call.site);
}

// True if ranks pass lists whose arrays differ in nothing but shape, though not in size.
bool differ_in_shapes(std::span<const CallOfRank> calls) {
  const Signature& first = calls[0].signature;
  const auto differs_in_shapes = [&](const CallOfRank& call) {
    const Signature& s = call.signature;
    return is_list(s.list) && s.packed() == first.packed() && s.count == first.count &&
           ((s.list ^ first.list) & ~kListShapes) == 0;
  };
  return std::ranges::all_of(calls, differs_in_shapes);
}

// True if ranks make one call with splits, which differ.
bool differ_in_splits(std::span<const CallOfRank> calls) {
  return std::ranges::all_of(calls, [&](const CallOfRank& call) {
    const Signature& s = call.signature;
    return is_one_of(s.op, {Op::kGatherSplits, Op::kScatterSplits, Op::kAllToAllSplits}) &&
           s.packed() == calls[0].signature.packed();
  });
}

// True if ranks call `op` with arrays that differ in nothing but size.
bool is_uneven(Op op, std::span<const CallOfRank> calls) {
  const auto has_count_of_first = [&](const CallOfRank& call) {
    return call.signature.count == calls[0].signature.count;
  };
  if (std::ranges::all_of(calls, has_count_of_first)) return false;
  return std::ranges::all_of(calls, [&](const CallOfRank& call) {
    const Signature& s = call.signature;
    return s.op == op && !is_list(s.list) && s.packed() == calls[0].signature.packed();
  });
}

}  // namespace

Error mismatch_of(std::uint64_t sequence, int rank, std::span<const CallOfRank> calls) {
  std::string message = "ranks called different collectives (call " + std::to_string(sequence) +
                        ", seen from rank " + std::to_string(rank) + " of " +
                        std::to_string(calls.size()) + "):";
  std::vector<int> ranks;
  const Signature& own = calls[static_cast<std::size_t>(rank)].signature;
  for (std::size_t p = 0; p < calls.size(); ++p) {
    const Signature& theirs = calls[p].signature;
    std::uint64_t list = own.list;
    if (theirs.packed() != own.packed() || theirs.count != own.count ||
        !matches(list, theirs.list)) {
      ranks.push_back(static_cast<int>(p));
    }
    message += line(static_cast<int>(p), calls[p]);
  }
  if (ranks.empty()) {  // this rank's array is flat, and the shapes of others differ
    for (std::size_t p = 0; p < calls.size(); ++p) {
      if (calls[p].signature.list != own.list) ranks.push_back(static_cast<int>(p));
    }
  }
  if (differ_in_shapes(calls)) message += "\nthe arrays of the lists differ in shape";
  if (differ_in_splits(calls)) message += "\nthe splits differ, or the shapes of the rows";
  if (is_uneven(Op::kAllGather, calls)) {
    message += "\nall_gather of parts that differ in size needs splits=, the rows of each rank";
  }
  if (is_uneven(Op::kAllToAll, calls)) {
    message += "\nall_to_all of parts that differ in size needs splits=, the rows for each rank";
  }
  return {ErrorCode::kMismatch, message, std::move(ranks)};
}

Error transfer_mismatch_of(std::uint64_t number, int rank, const CallOfRank& own, int other,
                           const CallOfRank& theirs) {
  return {ErrorCode::kMismatch,
          "send and recv do not match (transfer " + std::to_string(number) +
              " between these ranks):" + line(rank, own) + line(other, theirs),
          {other}};
}

}  // namespace fastdist
