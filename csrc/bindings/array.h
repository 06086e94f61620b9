// Python arrays as views of memory: numpy by its C struct, torch by DLPack's C exchange table,
// everything else by DLPack's Python protocol or the buffer protocol.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/types.h"

namespace fastdist::bindings {

enum class Access { kRead, kWrite };

// Where arrays must lie: in the machine's memory, or on this GPU.
struct Place {
  std::optional<int> device;
};

// One array or a list of arrays, and what keeps their memory valid besides the objects themselves.
class Arrays {
 public:
  // `argument` names the parameter in messages. Raises TypeError for what is no array of a known
  // dtype, ValueError for views with gaps, read-only arrays, and arrays on another GPU.
  Arrays(pybind11::handle object, Access access, const char* argument, const Place& place = {});

  [[nodiscard]] TensorViews views() const noexcept {
    return is_list_ ? TensorViews(list_) : TensorViews(&one_, 1);
  }
  [[nodiscard]] bool is_list() const noexcept { return is_list_; }
  [[nodiscard]] const char* argument() const noexcept { return argument_; }
  // Hands over what keeps the memory valid (or None), so that these views may be dropped without
  // the GIL.
  [[nodiscard]] pybind11::object take_holder() {
    return holder_ ? std::exchange(holder_, {}) : pybind11::none();
  }

 private:
  TensorView one_;
  std::vector<TensorView> list_;
  bool is_list_ = false;
  const char* argument_;
  pybind11::object holder_;
};

// Raises ValueError unless `out` fits `in` array by array, each the same memory or apart.
void check_fits(const Arrays& in, const Arrays& out);
// Raises ValueError unless both are one array, or lists as long as each other.
void check_as_many(const Arrays& in, const Arrays& out);
// Raises ValueError where `out` shares memory with `in` or within itself.
void check_apart(const Arrays& in, const Arrays& out);

}  // namespace fastdist::bindings
