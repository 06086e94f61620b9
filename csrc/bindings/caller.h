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

// Told when the interpreter is about to shut down.
void begin_exit() noexcept;

// Takes the GIL back. Where the interpreter is shutting down it would end the thread by unwinding
// it, through destructors that may not throw; a thread that comes that late waits here for the end
// of the process.
void retake_gil(PyThreadState* state) noexcept;

// Lets go of the GIL for a while.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() { retake_gil(state_); }

 private:
  PyThreadState* state_;
};

// The thread that waits is the one that called. It holds the GIL until the call may block, and
// again when this object is gone: a small collective ends before it is worth letting go.
class PythonCaller final : public Caller {
 public:
  PythonCaller() = default;
  ~PythonCaller() override {
    if (released_ != nullptr) retake_gil(released_);
  }
  [[nodiscard]] std::string location() const override;
  void check_interrupt() const override;
  void may_block() const override {
    if (released_ == nullptr) released_ = PyEval_SaveThread();
  }

 private:
  mutable PyThreadState* released_ = nullptr;
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
