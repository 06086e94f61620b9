#include "core/error.h"

#include <cerrno>
#include <cstring>

namespace fastdist {

Error system_error(const std::string& message) {
  return {ErrorCode::kSystem, message + ": " + std::strerror(errno)};
}

}  // namespace fastdist
