// Who made a call, for error messages and for Ctrl-C.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "core/communicator.h"

namespace fastdist::bindings {

// "file.py:12 in train" of the innermost frame outside of fastdist; "" where there is none.
// Needs the GIL.
[[nodiscard]] std::string python_location();

// The thread that waits is the one that called. Used without the GIL.
class PythonCaller final : public Caller {
 public:
  [[nodiscard]] std::string location() const override;
  void check_interrupt() const override;
};

// The call runs in a thread of ours.
class RecordedCaller final : public Caller {
 public:
  explicit RecordedCaller(std::string location) : location_(std::move(location)) {}
  [[nodiscard]] std::string location() const override { return location_; }
  void check_interrupt() const override {}

 private:
  std::string location_;
};

}  // namespace fastdist::bindings
