// A step of a collective between the ranks of this machine.
#pragma once

#include "net/communicator.h"

namespace fastdist::net {

// Ranks wait longer for each further step, so that the rank that knows which rank is late raises
// first.
inline constexpr std::chrono::milliseconds kGrace{300};

template <class Call>
void NetCommunicator::inside(int grace, const Call& call) {
  const CallOptions options{options_->timeout + grace * kGrace, watcher_, nullptr,
                            &wait_->signature};
  try {
    call(options);
  } catch (const Error& error) {
    throw_inner(error, *wait_);
  }
}

}  // namespace fastdist::net
