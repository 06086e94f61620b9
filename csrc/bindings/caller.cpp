#include "bindings/caller.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>

#include "core/echo.h"
#include "core/work.h"

namespace fastdist::bindings {

namespace {

std::atomic<bool> exiting{false};
std::atomic<bool> is_telling{false};    // a thread reports a waiting call
std::atomic<bool> is_answering{false};  // a thread may run Python to answer another process
// Never released: they may be used until the process ends.
py::handle stalled_function = Py_None;
py::handle explain_function = Py_None;
py::handle answer_function = Py_None;

bool is_finalizing() noexcept {
  if (exiting.load()) return true;
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

void answer_all(const FileDescriptor& asked) noexcept {
  std::array<char, 64> questions{};
  while (::read(asked.get(), questions.data(), questions.size()) > 0) {
    is_answering = true;
    if (!is_finalizing()) {
      const py::gil_scoped_acquire gil;
      try {
        answer_function();
      } catch (const std::exception&) {  // who asks waits in vain
      }
    }
    is_answering = false;
  }
}

}  // namespace

void answer_from_thread(const std::string& path, const py::object& answer) {
  FileDescriptor asked(::open(path.c_str(), O_RDWR | O_CLOEXEC));  // its end is never seen
  if (asked.get() < 0) throw std::system_error(errno, std::generic_category(), path);
  answer_function = answer.inc_ref();
  try {
    start_without_signals([asked = std::move(asked)] { answer_all(asked); });
  } catch (const std::system_error&) {  // no thread can be created
  }
}

void begin_exit() noexcept {
  constexpr std::chrono::seconds kLongest{3};
  exiting.store(true);
  // A thread that runs Python while the interpreter shuts down would be unwound.
  const auto start = std::chrono::steady_clock::now();
  const GilRelease release;
  while ((is_telling || is_answering) && std::chrono::steady_clock::now() - start < kLongest) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void retake_gil(PyThreadState* state) noexcept {
  // The main thread shuts the interpreter down, and may continue.
  const bool is_main = ::syscall(SYS_gettid) == ::getpid();
  while (!is_main && is_finalizing()) ::pause();
  PyEval_RestoreThread(state);
}

void set_speaker(const py::object& stalled, const py::object& explain) {
  stalled_function = stalled.inc_ref();
  explain_function = explain.inc_ref();
}

std::string explain_failure(bool is_late) {
  if (is_finalizing() || explain_function.is_none()) return "";
  const py::object why = explain_function(is_late);
  try {
    return why.cast<std::string>();
  } catch (const std::exception&) {
    return "";  // invalid text; the failure itself must still be reported
  }
}

void Patience::wait() noexcept {
  const auto now = Clock::now();
  if (since_ == Clock::time_point{}) since_ = now;
  if (now - since_ < next_) return;
  next_ = (now - since_) * 3 / 2;
  if (is_finalizing() || is_telling.exchange(true)) return;
  const double seconds = std::chrono::duration<double>(now - since_).count();
  try {
    std::thread([seconds] {
      if (!is_finalizing()) {
        const py::gil_scoped_acquire gil;
        try {
          if (!stalled_function.is_none()) stalled_function(seconds);
        } catch (const std::exception&) {  // a mere report must not end the program
        }
      }
      is_telling = false;
    }).detach();
  } catch (const std::exception&) {  // no thread can be created
    is_telling = false;
  }
}

std::string PythonCaller::location() const {
  if (location_) return *location_;
  if (is_finalizing()) return "";
  const py::gil_scoped_acquire gil;
  try {
    return python_location();
  } catch (...) {
    return "";  // peers wait for this answer: an empty location is better than a late one
  }
}

bool PythonCaller::is_alone() const {
  if (is_finalizing() || WorkQueue::any_pending()) return false;
  const py::gil_scoped_acquire gil;
  PyThreadState* const own = PyThreadState_Get();
  // The list begins with the newest thread. Only this thread's own state is sure to stay valid.
  return PyInterpreterState_ThreadHead(PyInterpreterState_Get()) == own &&
         PyThreadState_Next(own) == nullptr;
}

void PythonCaller::check_interrupt() const {
  if (is_finalizing()) return;
  patience_.wait();
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  const py::error_already_set error;
  if (!defers_ || !error.matches(PyExc_Exception)) throw error;
  if (!raised_) raised_ = error;
}

}  // namespace fastdist::bindings
