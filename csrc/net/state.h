// What a rank that waits answers when others ask for its state; see deadlock.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/signature.h"

namespace fastdist::net {

// At the beginning of an answer. The numbers of sends to and receives from each rank follow, then
// the waits of those for which a rank waits elsewhere, and the caller's line.
struct State {
  std::uint64_t sequence;   // collectives begun
  std::uint64_t signature;  // of the call in which the rank waits
  std::uint64_t count;
  std::uint64_t list;
  std::uint64_t id;      // of the wait, if the process makes no call at all before it ends, else 0
  std::uint32_t number;  // of the transfer, if it waits in one
  std::uint32_t ranks;
  std::uint32_t is_alone;  // no other thread of the rank may act meanwhile
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

// Returns the answer of a rank that waits; `call` is not used.
[[nodiscard]] std::string serialize(const Waiting& waiting);

// Reads an answer of a communicator of `ranks` ranks, if it can be one.
[[nodiscard]] std::optional<Waiting> parse(const std::string& text, std::size_t ranks);

}  // namespace fastdist::net
