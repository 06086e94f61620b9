// Views of Python arrays: numpy through its C struct, torch through DLPack's C exchange table, all
// others through DLPack's Python protocol or the buffer protocol.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/types.h"

namespace fastdist::bindings {

namespace py = pybind11;

enum class Access { kRead, kWrite };

// --- Where an array is --------------------------------------------------------------------------

inline constexpr int kOnHost = -2;
inline constexpr int kSomeGpu = -1;  // of an empty array whose library does not say which

// Returns the GPU of an array, or of the first array of a list that has one; or kOnHost, kSomeGpu.
// `device_of` is called for arrays whose type has no C function for this: a number, or None.
[[nodiscard]] int gpu_of(py::handle arrays, py::handle device_of);
// Returns the stream on `gpu` that is current in the library of an array, or of a list's first
// array; nothing if the library has no C function for that.
[[nodiscard]] std::optional<void*> current_stream(py::handle arrays, int gpu);

// One array or a list of arrays, with the objects that keep the memory valid.
class Arrays {
 public:
  // `argument` names the parameter in messages. Without `gpu`, arrays must be in host memory.
  // Raises TypeError for objects that are not arrays of a supported dtype, and ValueError for views
  // with gaps, read-only arrays and arrays on another GPU.
  Arrays(py::handle object, Access access, const char* argument, std::optional<int> gpu = {});

  [[nodiscard]] TensorViews views() const noexcept {
    return is_list_ ? TensorViews(list_) : TensorViews(&one_, 1);
  }
  [[nodiscard]] bool is_list() const noexcept { return is_list_; }
  [[nodiscard]] const char* argument() const noexcept { return argument_; }
  // Moves out the object that keeps the memory valid (or None), so that the views can be destroyed
  // without the GIL.
  [[nodiscard]] py::object take_holder() {
    return holder_ ? std::exchange(holder_, {}) : py::none();
  }

 private:
  const char* argument_;
  py::object holder_;
  bool is_list_;
  TensorView one_;
  std::vector<TensorView> list_;
};

// Returns a view's dtype and number of elements, for messages.
[[nodiscard]] std::string text_of(const TensorView& view);
// Raises ValueError unless each array of `out` fits its array of `in` and is either the same memory
// or disjoint.
void check_fits(const Arrays& in, const Arrays& out);
// Raises ValueError unless both are one array, or both are lists of the same length.
void check_same_count(const Arrays& in, const Arrays& out);
// Raises ValueError if `out` shares memory with `in` or within itself.
void check_no_overlap(TensorViews in, const Arrays& out);

}  // namespace fastdist::bindings
