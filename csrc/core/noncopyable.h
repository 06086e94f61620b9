// The base of classes whose objects are neither copied nor moved.
#pragma once

namespace fastdist {

struct NonCopyable {
  NonCopyable() = default;
  NonCopyable(const NonCopyable&) = delete;
  NonCopyable& operator=(const NonCopyable&) = delete;
};

}  // namespace fastdist
