// The line of Python that called fastdist, by the interpreter's frames or, faster, their structs.

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/caller.h"
#include "core/recorder.h"

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

Layer layer_of(PyFrameObject* frame) {
  const py::handle object(reinterpret_cast<PyObject*>(frame));
  const auto module = to_utf8(py::str(object.attr("f_globals").attr("get")("__name__", py::str())));
  if (is_in_package(module, "fastdist")) return Layer::kFastdist;
  const bool is_library = is_in_package(module, "torch") || module == "contextlib";
  return is_library ? Layer::kLibrary : Layer::kUser;
}

std::string text_of(PyFrameObject* frame, PyCodeObject* code) {
  return to_utf8(py::reinterpret_borrow<py::object>(code->co_filename)) + ":" +
         std::to_string(PyFrame_GetLineNumber(frame)) + " in " +
         to_utf8(py::reinterpret_borrow<py::object>(code->co_name));
}

// --- frames as the interpreter has them: objects for them take ten times as long ----------------

struct Frame;
#if PY_VERSION_HEX >= 0x030F0000  // unknown yet; objects
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

struct Code {
  Layer layer;
  py::object object;  // kept so that no other code gets its address
  std::unordered_map<std::size_t, std::uint16_t> sites;  // by the instruction that calls
};
using Codes = std::unordered_map<const void*, Code>;

// A line of user code that calls a fastdist function which itself makes the call: the usual case.
struct Direct {
  const void* inner = nullptr;  // the code of that function
  const void* code = nullptr;
  std::size_t at = 0;
  std::uint16_t site = recorder::kNoSite;
};

class Knowledge {
 public:
  // Returns null for unknown code.
  [[nodiscard]] Code* find(const void* code) noexcept {
    const auto found = codes_.find(code);
    return found == codes_.end() ? nullptr : &found->second;
  }
  Code& add(const void* code, Layer layer) {
    if (codes_.size() == kMostCodes) {
      dropped.push_back(std::exchange(codes_, {}));
      direct_ = {};
    }
    auto* const object = static_cast<PyObject*>(const_cast<void*>(code));
    return codes_[code] = {layer, py::reinterpret_borrow<py::object>(object), {}};
  }
  [[nodiscard]] Direct& direct(std::size_t at) noexcept { return direct_[at / 2 % direct_.size()]; }
  // A forked child's file has no sites yet.
  void begin_file(const recorder::File* file) noexcept {
    if (file_ == file) return;
    for (auto& [address, code] : codes_) code.sites.clear();
    direct_ = {};
    file_ = file;
  }

  std::vector<Codes> dropped;  // released when nobody uses this, since Python code may run

 private:
  static constexpr std::size_t kMostCodes = 2048;

  const recorder::File* file_ = nullptr;  // whose sites these are
  std::array<Direct, 64> direct_;
  Codes codes_;
};

// What is known, for one thread at a time. Needs the GIL.
class KnowledgeLock : NonCopyable {
 public:
  KnowledgeLock() {
#ifdef Py_GIL_DISABLED
    PyMutex_Lock(&mutex);
#endif
  }
  ~KnowledgeLock() {
    std::vector<Codes> dropped;
    if (!known.dropped.empty()) dropped.swap(known.dropped);
#ifdef Py_GIL_DISABLED
    PyMutex_Unlock(&mutex);
#endif
  }
  Knowledge& operator*() const noexcept { return known; }

 private:
  static inline Knowledge& known = *new Knowledge;  // lives longer than the interpreter
#ifdef Py_GIL_DISABLED
  // A thread that waits for a std::mutex could not stop when all threads must.
  static inline PyMutex mutex{};
#endif
};

// Calls `look(frame, code, layer)` for this thread's frames, the innermost first, until it returns
// true. Learns their layers.
void look_at_frames(Knowledge& known, const auto& look) {
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const here = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(here)));
    const Code* const found = known.find(code.ptr());
    const Layer layer = (found != nullptr ? *found : known.add(code.ptr(), layer_of(here))).layer;
    if (look(here, reinterpret_cast<PyCodeObject*>(code.ptr()), layer)) return;
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
  }
}

void learn_layers(Knowledge& known) {
  look_at_frames(known, [](auto&&...) { return false; });
  // The interpreter's own frames have no objects.
  for (const Frame* f = innermost(); f != nullptr; f = before(*f)) {
    const void* const code = code_of(*f);
    if (known.find(code) == nullptr) known.add(code, Layer::kFastdist);
  }
}

// Returns the innermost frame of user code, or else of library code; null if there is none, or if
// the search meets a frame of an unknown layer.
const Frame* find_caller(Knowledge& known, bool& knows_all) {
  const Frame* inner = nullptr;
  knows_all = true;
  for (const Frame* f = innermost(); f != nullptr; f = before(*f)) {
    const Code* const code = known.find(code_of(*f));
    if (code == nullptr) {
      knows_all = false;
      return nullptr;
    }
    if (code->layer == Layer::kUser) return f;
    if (code->layer == Layer::kLibrary && inner == nullptr) inner = f;
  }
  return inner;
}

// Returns the text of the caller's frame, and remembers the layers of the frames that it looks at.
std::string location_of(Knowledge& known) {
  std::string found;  // in a library if no frame is the user's: that may be in another thread
  look_at_frames(known, [&](PyFrameObject* frame, PyCodeObject* code, Layer layer) {
    if (layer == Layer::kUser || (layer == Layer::kLibrary && found.empty())) {
      found = text_of(frame, code);
    }
    return layer == Layer::kUser;
  });
  return found;
}

std::uint16_t search_site(Knowledge& known) {
  bool knows_all = true;
  const Frame* caller = find_caller(known, knows_all);
  if (!knows_all) {
    learn_layers(known);
    caller = find_caller(known, knows_all);
  }
  if (caller == nullptr) return recorder::kNoSite;
  const void* const code = code_of(*caller);
  const std::size_t at = instruction_of(*caller);
  const auto& sites = known.find(code)->sites;
  const auto found = sites.find(at);
  if (found != sites.end()) return found->second;
  const std::uint16_t made = recorder::add_site(location_of(known));
  // Finalizers that ran meanwhile may have made calls, too many to remember this code.
  if (Code* const same = known.find(code)) same->sites[at] = made;
  return made;
}

std::uint16_t find_site(Knowledge& known) {
  const Frame* const inner = innermost();
  const Frame* const outer = inner == nullptr ? nullptr : before(*inner);
  if (outer == nullptr) return search_site(known);
  const void* const code = code_of(*outer);
  const std::size_t at = instruction_of(*outer);
  Direct& direct = known.direct(at);
  if (direct.inner == code_of(*inner) && direct.code == code && direct.at == at) return direct.site;
  const std::uint16_t site = search_site(known);
  const Code* const callee = known.find(code_of(*inner));
  const Code* const caller = known.find(code);
  if (callee != nullptr && callee->layer == Layer::kFastdist && caller != nullptr &&
      caller->layer == Layer::kUser) {
    direct = {code_of(*inner), code, at, site};
  }
  return site;
}

}  // namespace

std::string python_location() {
  const KnowledgeLock access;
  return location_of(*access);
}

std::uint16_t python_site() noexcept {
  const recorder::File* const file = recorder::file.load(std::memory_order_relaxed);
  if (file == nullptr) return recorder::kNoSite;
  try {
    const KnowledgeLock access;
    Knowledge& known = *access;
    known.begin_file(file);
    return find_site(known);
  } catch (...) {  // no memory, or an interpreter that shuts down
    PyErr_Clear();
    return recorder::kNoSite;
  }
}

}  // namespace fastdist::bindings
