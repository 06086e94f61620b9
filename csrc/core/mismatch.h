// The errors for ranks whose calls differ.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/error.h"
#include "core/signature.h"

namespace fastdist {

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
