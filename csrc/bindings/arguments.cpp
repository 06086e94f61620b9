#include "bindings/arguments.h"

#include <algorithm>

#include "core/error.h"
#include "core/inbox.h"

namespace fastdist::bindings {

void throw_unexpected(const std::string& expected, py::handle got) {
  const bool is_type = PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_TypeError) != 0;
  PyErr_Clear();
  throw Error(is_type ? ErrorCode::kType : ErrorCode::kValue,
              expected + ", got " + py::repr(got).cast<std::string>());
}

int to_rank(py::handle rank, const char* argument, int size, std::optional<int> self) {
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(rank.ptr(), &overflow);
  if (value >= 0 && value < size && value != self) return static_cast<int>(value);
  throw_unexpected(
      std::string(argument) + " must be an integer from 0 to " + std::to_string(size - 1) +
          (self ? ", but not this rank, " + std::to_string(*self) + ", outside of a group" : ""),
      rank);
}

std::uint64_t to_tag(py::handle tag, bool of_object) {
  if (of_object) return to_tag(tag, false) | kObjectTag;
  if (tag.is_none()) return 0;
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(tag.ptr(), &overflow);
  if (value >= 0) return static_cast<std::uint64_t>(value);
  throw_unexpected("tag must be an integer from 0 to 2**63 - 1", tag);
}

std::chrono::nanoseconds to_duration(py::handle timeout, bool may_be_zero) {
  constexpr double kLongest = 1e9;
  const double seconds = PyFloat_AsDouble(timeout.ptr());
  if (seconds > 0 || (may_be_zero && seconds == 0)) {
    return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, kLongest) * 1e9));
  }
  throw_unexpected(may_be_zero ? "timeout must be a number of seconds, 0 or more"
                               : "timeout must be a positive number of seconds",
                   timeout);
}

}  // namespace fastdist::bindings
