#include "bindings/python_site.h"

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/recorder.h"

namespace py = pybind11;

namespace fastdist::bindings {
namespace {

// --- frames as Python objects -------------------------------------------------------------------

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

// --- frames as the interpreter has them: objects for them take ten times as long ----------------

struct Frame;
#if PY_VERSION_HEX >= 0x030F0000 || PY_VERSION_HEX < 0x030B0000  // unknown yet; objects
const Frame* innermost() { return reinterpret_cast<const Frame*>(PyEval_GetFrame()); }
const Frame* before(const Frame& frame) {
  auto* const object = reinterpret_cast<PyFrameObject*>(const_cast<Frame*>(&frame));
  PyFrameObject* const back = PyFrame_GetBack(object);
  Py_XDECREF(back);  // `object` has a reference
  return reinterpret_cast<const Frame*>(back);
}
const void* code_of(const Frame& frame) {
  auto* const object = reinterpret_cast<PyFrameObject*>(const_cast<Frame*>(&frame));
  PyCodeObject* const code = PyFrame_GetCode(object);
  Py_DECREF(code);
  return code;
}
std::size_t instruction_of(const Frame& frame) {
  auto* const object = reinterpret_cast<PyFrameObject*>(const_cast<Frame*>(&frame));
  return static_cast<std::size_t>(PyFrame_GetLineNumber(object));
}
#else
#if PY_VERSION_HEX >= 0x030C0000
struct Frame {  // the first fields of a _PyInterpreterFrame
  const void* executable;
  Frame* previous;
};
const void* code_of(const Frame& frame) {
  PyObject* const code = PyUnstable_InterpreterFrame_GetCode(
      reinterpret_cast<_PyInterpreterFrame*>(const_cast<Frame*>(&frame)));
  Py_XDECREF(code);  // the frame has a reference
  return code;
}
std::size_t instruction_of(const Frame& frame) {
  return static_cast<std::size_t>(PyUnstable_InterpreterFrame_GetLasti(
      reinterpret_cast<_PyInterpreterFrame*>(const_cast<Frame*>(&frame))));
}
#else
struct Frame {  // the first fields of a _PyInterpreterFrame
  std::array<void*, 4> function_and_names;
  const void* code;
  void* object;
  Frame* previous;
  const void* instruction;
};
const void* code_of(const Frame& frame) { return frame.code; }
std::size_t instruction_of(const Frame& frame) {
  return reinterpret_cast<std::size_t>(frame.instruction);
}
#endif
const Frame* before(const Frame& frame) { return frame.previous; }
const Frame* innermost() {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<const Frame*>(PyThreadState_Get()->current_frame);
#else
  return reinterpret_cast<const Frame*>(PyThreadState_Get()->cframe->current_frame);
#endif
}
#endif

// --- what is known of them ----------------------------------------------------------------------

// Values of places in code. When half the slots are taken, all are forgotten.
template <class Value, std::size_t kSlots>
class Memory {
 public:
  [[nodiscard]] const Value* find(const void* code, std::size_t at) const noexcept {
    for (std::size_t i = slot_of(code, at); slots_[i].code != nullptr; i = (i + 1) % kSlots) {
      if (slots_[i].code == code && slots_[i].at == at) return &slots_[i].value;
    }
    return nullptr;
  }
  void add(const void* code, std::size_t at, Value value) noexcept {
    if (2 * ++used_ > kSlots) {
      slots_ = {};
      used_ = 1;
    }
    std::size_t i = slot_of(code, at);
    while (slots_[i].code != nullptr) i = (i + 1) % kSlots;
    slots_[i] = {code, at, value};
  }

 private:
  static std::size_t slot_of(const void* code, std::size_t at) noexcept {
    const std::size_t mixed = (reinterpret_cast<std::size_t>(code) >> 4) * 0x9E3779B97F4A7C15U;
    return ((mixed >> 32) + at) % kSlots;
  }
  struct Slot {
    const void* code;
    std::size_t at;
    Value value;
  };
  std::array<Slot, kSlots> slots_{};
  std::size_t used_ = 0;
};

// A line of the user's that calls a function of fastdist, which makes the call: most are such.
struct Direct {
  const void* inner = nullptr;  // the code of that function
  const void* code = nullptr;
  std::size_t at = 0;
  std::uint16_t site = recorder::kNoSite;
};

struct Knowledge {
  const recorder::File* file = nullptr;  // whose sites these are
  std::array<Direct, 64> direct;
  Memory<Layer, 4096> layers;
  Memory<std::uint16_t, 2048> sites;
};

// Learns the layers of all frames of this thread.
void learn_layers(Memory<Layer, 4096>& layers) {
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const here = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(here)));
    if (layers.find(code.ptr(), 0) == nullptr) {
      layers.add(code.ptr(), 0, layer_of(here, reinterpret_cast<PyCodeObject*>(code.ptr())));
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
  }
  // The interpreter's own frames have no objects.
  for (const Frame* f = innermost(); f != nullptr; f = before(*f)) {
    const void* const code = code_of(*f);
    if (layers.find(code, 0) == nullptr) layers.add(code, 0, Layer::kFastdist);
  }
}

// Returns the innermost frame of the user's, or else of a library's, code; null if there is none,
// or if `layers` does not know all of the frames before.
const Frame* find_caller(const Memory<Layer, 4096>& layers, bool& knows_all) {
  const Frame* inner = nullptr;
  knows_all = true;
  for (const Frame* f = innermost(); f != nullptr; f = before(*f)) {
    const Layer* const layer = layers.find(code_of(*f), 0);
    if (layer == nullptr) {
      knows_all = false;
      return nullptr;
    }
    if (*layer == Layer::kUser) return f;
    if (*layer == Layer::kLibrary && inner == nullptr) inner = f;
  }
  return inner;
}

std::uint16_t search_site(Knowledge& known) {
  bool knows_all = true;
  const Frame* caller = find_caller(known.layers, knows_all);
  if (!knows_all) {
    learn_layers(known.layers);
    caller = find_caller(known.layers, knows_all);
  }
  if (caller == nullptr) return recorder::kNoSite;
  const void* const code = code_of(*caller);
  const std::size_t at = instruction_of(*caller);
  if (const std::uint16_t* const site = known.sites.find(code, at)) return *site;
  const std::uint16_t made = recorder::add_site(python_location());
  known.sites.add(code, at, made);
  return made;
}

std::uint16_t find_site(Knowledge& known) {
  const Frame* const inner = innermost();
  const Frame* const outer = inner == nullptr ? nullptr : before(*inner);
  if (outer == nullptr) return search_site(known);
  const void* const code = code_of(*outer);
  const std::size_t at = instruction_of(*outer);
  Direct& direct = known.direct[at / 2 % known.direct.size()];
  if (direct.inner == code_of(*inner) && direct.code == code && direct.at == at) return direct.site;
  const std::uint16_t site = search_site(known);
  const Layer* const layer = known.layers.find(code_of(*inner), 0);
  const Layer* const outer_layer = known.layers.find(code, 0);
  if (layer != nullptr && *layer == Layer::kFastdist && outer_layer != nullptr &&
      *outer_layer == Layer::kUser) {
    direct = {code_of(*inner), code, at, site};
  }
  return site;
}

}  // namespace

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

std::uint16_t python_site() noexcept {
  const recorder::File* const file = recorder::file.load(std::memory_order_relaxed);
  if (file == nullptr) return recorder::kNoSite;
  static Knowledge& known = *new Knowledge;  // lives longer than the interpreter
#ifdef Py_GIL_DISABLED
  // A std::mutex would keep a thread that waits for it from stopping when all threads must.
  static PyMutex mutex{};
  struct Lock {
    Lock() { PyMutex_Lock(&mutex); }
    ~Lock() { PyMutex_Unlock(&mutex); }
  } const lock;
#endif
  try {
    if (known.file != file) {  // a forked child's file has no sites yet
      known.sites = {};
      known.direct = {};
      known.file = file;
    }
    return find_site(known);
  } catch (...) {  // no memory, or an interpreter that shuts down
    PyErr_Clear();
    return recorder::kNoSite;
  }
}

}  // namespace fastdist::bindings
