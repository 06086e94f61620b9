// Errors whose messages contain numbers.
#pragma once

#include <sstream>

#include "core/error.h"

namespace fastdist::table {

// Throws an Error whose message is `parts`, one after another.
template <class... Parts>
[[noreturn]] void refuse(ErrorCode code, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(code, message.str());
}

}  // namespace fastdist::table
