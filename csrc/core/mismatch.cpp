#include "core/mismatch.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace fastdist {
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
    const bool has_splits =
        s.op == Op::kGatherSplits || s.op == Op::kScatterSplits || s.op == Op::kAllToAllSplits;
    return has_splits && s.packed() == calls[0].signature.packed();
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
