#include "bindings/caller.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace py = pybind11;

namespace fastdist::bindings {

namespace {

std::atomic<bool> exiting{false};

bool is_finalizing() noexcept {
  if (exiting.load(std::memory_order_relaxed)) return true;
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Encodes as UTF-8; file names may contain bytes that are not valid text.
std::string to_utf8(const py::object& text) {
  return py::bytes(text.attr("encode")("utf-8", "backslashreplace")).cast<std::string>();
}

bool is_in_package(const std::string& module, const std::string& package) {
  return module.rfind(package, 0) == 0 &&
         (module.size() == package.size() || module[package.size()] == '.');
}

}  // namespace

void begin_exit() noexcept { exiting.store(true, std::memory_order_relaxed); }

bool is_exiting() noexcept { return exiting.load(std::memory_order_relaxed); }

void retake_gil(PyThreadState* state) noexcept {
  // The main thread shuts the interpreter down, and may continue.
  const bool is_main = ::syscall(SYS_gettid) == ::getpid();
  while (!is_main && is_finalizing()) ::pause();
  PyEval_RestoreThread(state);
}

std::string python_location() {
  std::string inner;  // in a library: the user's frame may be in another thread
  py::object frame =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame && !frame.is_none()) {
    const std::string module =
        to_utf8(py::str(frame.attr("f_globals").attr("get")("__name__", "")));
    const bool is_library = is_in_package(module, "torch") || module == "contextlib";
    if (!is_in_package(module, "fastdist") && (!is_library || inner.empty())) {
      const py::object code = frame.attr("f_code");
      std::string found = to_utf8(
          py::str("{}:{} in {}")
              .format(code.attr("co_filename"), frame.attr("f_lineno"), code.attr("co_name")));
      if (!is_library) return found;
      inner = std::move(found);
    }
    frame = frame.attr("f_back");
  }
  return inner;
}

std::string PythonCaller::location() const {
  if (is_finalizing()) return "";
  const py::gil_scoped_acquire gil;
  try {
    return python_location();
  } catch (...) {
    return "";  // peers wait for this answer: an empty location is better than a late one
  }
}

void PythonCaller::check_interrupt() const {
  if (is_finalizing()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace fastdist::bindings
