// The caller of a collective, for error messages and Ctrl-C.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/communicator.h"
#include "core/error.h"
#include "core/recorder.h"

namespace fastdist::bindings {

namespace py = pybind11;

// Returns "file.py:12 in train" for the innermost frame outside fastdist and torch; "" if all
// frames are fastdist's, and the innermost frame in torch if the others are torch's. Needs the GIL.
[[nodiscard]] std::string python_location();

// Returns the number of that line in the recorder's file, in a few nanoseconds where it is known;
// kNoSite where nothing is recorded. Needs the GIL.
[[nodiscard]] std::uint16_t python_site() noexcept;

// Must be called when the interpreter is about to shut down, with the GIL. Waits for the threads
// that report a waiting call and answer another process.
void begin_exit() noexcept;
// Calls `answer` in a thread of its own, which takes no signals, whenever bytes come through the
// pipe at `path`.
void answer_from_thread(const std::string& path, const py::object& answer);

// Takes the GIL again. While the interpreter shuts down, taking the GIL would end the thread by
// unwinding through destructors that must not throw; this function instead blocks such a thread
// until the process ends.
void retake_gil(PyThreadState* state) noexcept;

// Sets two Python functions. `stalled(seconds)` is called in its own thread with the time that a
// call has waited, at 5 s and then less and less often. `explain(is_late)` says why a call has
// failed; `is_late` is true if it failed because a rank is late.
void set_speaker(const py::object& stalled, const py::object& explain);
// Returns what `explain` says; "" if nothing. Throws what a signal handler raises meanwhile, such
// as KeyboardInterrupt. Needs the GIL.
[[nodiscard]] std::string explain_failure(bool is_late);

// Notices that a call has waited for a long time.
class Patience {
 public:
  // Called now and then while a call waits. Does not take the GIL: the call must continue while
  // another thread keeps the GIL, and no signal handler may run here.
  void wait() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point since_{};
  Clock::duration next_ = std::chrono::seconds(5);
};

class GilRelease : NonCopyable {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() { retake_gil(state_); }

 private:
  PyThreadState* state_;
};

// A caller whose own thread runs the call. The thread keeps the GIL until the call may block, and
// takes it again when this object is destroyed: a small collective ends before releasing the GIL
// would pay off.
class PythonCaller final : public Caller {
 public:
  // Not defaulted: gcc would fill the whole object with zeros first, which takes 5 ns.
  PythonCaller() noexcept {}
  // `location`: known in advance, so that the thread need not search for it without the GIL.
  explicit PythonCaller(std::string location)
      : location_(std::move(location)), site_(python_site()) {}
  ~PythonCaller() override {
    if (released_ != nullptr) retake_gil(released_);
  }
  [[nodiscard]] std::string location() const override;
  [[nodiscard]] std::uint16_t site() const noexcept override {
    return location_ || released_ != nullptr ? site_ : python_site();
  }
  void check_interrupt() const override;
  void may_block() const override {
    if (released_ == nullptr) released_ = PyEval_SaveThread();
  }
  [[nodiscard]] bool is_alone() const override;
  // Makes a call. What a signal handler raises meanwhile is thrown when the call has ended, since a
  // call that ends early ends the communicator; but Ctrl-C and other exceptions that should end the
  // program (those not derived from `Exception`) end the call.
  void run(auto&& call) const {
    defers_ = true;
    try {
      call();
    } catch (const Error&) {
      if (!raised_) throw;
    }
    if (raised_) throw *raised_;
  }

 private:
  std::optional<std::string> location_;
  std::uint16_t site_ = recorder::kNoSite;
  mutable bool defers_ = false;
  mutable std::optional<py::error_already_set> raised_;
  mutable PyThreadState* released_ = nullptr;
  mutable Patience patience_;
};

// A caller whose call runs in one of fastdist's own threads.
class RecordedCaller final : public Caller {
 public:
  // Needs the GIL.
  RecordedCaller() : location_(python_location()), site_(python_site()) {}
  // Acts for another caller.
  explicit RecordedCaller(const Caller& other) : location_(other.location()), site_(other.site()) {}
  [[nodiscard]] std::string location() const override { return location_; }
  [[nodiscard]] std::uint16_t site() const noexcept override { return site_; }
  void check_interrupt() const override { patience_.wait(); }

 private:
  std::string location_;
  std::uint16_t site_;
  mutable Patience patience_;
};

}  // namespace fastdist::bindings
