// The reply of a waiting rank to a state query; see deadlock.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/signature.h"

namespace fastdist::net {

// The beginning of a reply. Then follow the numbers of sends to and receives from each rank, the
// ids of the waits that a rank depends on in another communicator, and the caller's line.
struct State {
  std::uint64_t sequence;   // number of collectives begun
  std::uint64_t signature;  // of the call in which the rank waits
  std::uint64_t count;
  std::uint64_t list;
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
  Signature call;  // as in `state`
};

// Returns the reply as bytes; `call` is not used.
[[nodiscard]] std::string serialize(const Waiting& waiting);

// Reads a reply in a communicator of `ranks` ranks; returns nothing if `text` is not one.
[[nodiscard]] std::optional<Waiting> parse(const std::string& text, std::size_t ranks);

}  // namespace fastdist::net
