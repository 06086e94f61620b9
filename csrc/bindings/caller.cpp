#include "bindings/caller.h"

#include <frameobject.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "core/work.h"

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
  Py_ssize_t size = 0;
  if (const char* const known = PyUnicode_AsUTF8AndSize(text.ptr(), &size)) {
    return {known, static_cast<std::size_t>(size)};
  }
  PyErr_Clear();
  return py::bytes(text.attr("encode")("utf-8", "backslashreplace")).cast<std::string>();
}

bool is_in_package(const std::string& module, const std::string& package) {
  return module.rfind(package, 0) == 0 &&
         (module.size() == package.size() || module[package.size()] == '.');
}

enum class Layer { kFastdist, kLibrary, kUser };

// Returns whose code a frame runs, and remembers it for all frames of that code. No Python code
// runs under the lock.
Layer layer_of(PyFrameObject* frame, PyCodeObject* code) {
  constexpr std::size_t kMost = 4096;
  using Known = std::unordered_map<PyCodeObject*, std::pair<py::object, Layer>>;
  static Known& known = *new Known;  // lives longer than the interpreter
  static std::mutex& mutex = *new std::mutex;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(code); found != known.end()) return found->second.second;
  }
  const py::handle object(reinterpret_cast<PyObject*>(frame));
  const auto module = to_utf8(py::str(object.attr("f_globals").attr("get")("__name__", py::str())));
  const Layer layer = is_in_package(module, "fastdist")                          ? Layer::kFastdist
                      : is_in_package(module, "torch") || module == "contextlib" ? Layer::kLibrary
                                                                                 : Layer::kUser;
  Known dropped;  // destroyed after the lock
  const std::lock_guard lock(mutex);
  if (known.size() >= kMost) dropped.swap(known);
  // The reference keeps another code from taking this one's address.
  known.emplace(
      code,
      std::pair(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code)), layer));
  return layer;
}

std::string text_of(PyFrameObject* frame, PyCodeObject* code) {
  return to_utf8(py::reinterpret_borrow<py::object>(code->co_filename)) + ":" +
         std::to_string(PyFrame_GetLineNumber(frame)) + " in " +
         to_utf8(py::reinterpret_borrow<py::object>(code->co_name));
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
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const here = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(here)));
    auto* const its_code = reinterpret_cast<PyCodeObject*>(code.ptr());
    const Layer layer = layer_of(here, its_code);
    if (layer == Layer::kUser) return text_of(here, its_code);
    if (layer == Layer::kLibrary && inner.empty()) inner = text_of(here, its_code);
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
  }
  return inner;
}

void log_warning(const std::string& text) noexcept {
  if (is_finalizing()) return;
  const py::gil_scoped_acquire gil;
  try {
    py::module_::import("logging").attr("getLogger")("fastdist").attr("warning")("%s", text);
  } catch (...) {
    return;  // a broken log must not end a call
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
  // The list begins with the newest thread. Only this thread's own state is sure to live on.
  return PyInterpreterState_ThreadHead(PyInterpreterState_Get()) == own &&
         PyThreadState_Next(own) == nullptr;
}

void PythonCaller::check_interrupt() const {
  if (is_finalizing()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  const py::error_already_set error;
  if (!defers_ || !error.matches(PyExc_Exception)) throw error;
  if (!raised_) raised_ = error;
}

}  // namespace fastdist::bindings
