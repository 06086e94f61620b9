// A call of a collective: its Python arguments, parsed and checked in one way for host and GPU
// arrays. In Python, collectives/engines/nccl.py and tpu/engine.py know some of them, too.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

#include "bindings/array.h"
#include "core/communicator.h"
#include "core/signature.h"
#include "core/types.h"

namespace fastdist::bindings {

// The arguments of a call as Python gives them: borrowed, and None where they were not given.
struct CallArguments {
  // Takes the arguments of a vectorcall. Only the array may be positional.
  CallArguments(Op op, py::handle default_timeout, PyObject* const* values, Py_ssize_t positional,
                PyObject* keywords);

  Op op;
  py::handle array = Py_None;
  py::handle reduce_op = Py_None;  // `op` in Python
  py::handle root = Py_None;
  py::handle dst = Py_None;
  py::handle src = Py_None;
  py::handle tag = Py_None;
  py::handle out = Py_None;  // None: the result goes to `array`
  py::handle compress = Py_None;
  py::handle counts = Py_None;  // for each array, the elements from each rank to each rank
  py::handle bucket_bytes;      // null where it was not given
  py::handle stream = Py_None;  // GPUs: the handle of the stream on which the arrays are ready
  py::handle timeout = Py_None;
  py::handle async_op = Py_None;
  py::handle within = Py_None;  // the name of the call of which this one is a step
  bool in_group = false;        // where a rank may send to itself, also on GPUs

  // Returns the array, or list of arrays, that tells where a call's arrays are: scatter has an
  // input on the root only.
  [[nodiscard]] py::handle first_array() const { return array.is_none() ? out : array; }
  // Returns what holds the result: None on ranks that get none of a gather.
  [[nodiscard]] py::handle result() const {
    return out.is_none() && op != Op::kGather ? array : out;
  }
  // Returns the arguments that are not None, by name, for engines that know neither tags nor steps.
  [[nodiscard]] py::dict by_name() const;
  // Returns an object that keeps the arguments alive. Replaces lists, which their owners may
  // change.
  [[nodiscard]] py::object own();
};

// Returns `bucket_bytes`, 0 for "auto" and where it was not given.
[[nodiscard]] std::size_t to_bucket_bytes(const CallArguments& given);

// A call whose arguments are valid for this rank of `ranks`, with views of its arrays.
struct Call {
  Call(const CallArguments& given, const Communicator& ranks, std::optional<int> gpu = {});

  Op op;
  std::chrono::nanoseconds timeout;
  bool is_async;
  py::handle result;  // borrowed
  ReduceOp reduce_op = ReduceOp::kSum;
  int peer = 0;                  // the root, or the other rank of a send or receive
  std::uint64_t tag = 0;         // of that message
  std::optional<Arrays> in;      // none on ranks that give no array
  std::optional<Arrays> out;     // none on ranks that get no array, or if the result goes to `in`
  std::optional<DType> wire;     // the dtype of `compress`
  std::size_t bucket_bytes = 0;  // 0: the engine chooses
  std::vector<std::size_t> counts;  // empty: equal parts
  std::optional<Op> within;         // the call of which this one is a step

  [[nodiscard]] TensorViews inputs() const { return (in ? in : out)->views(); }
  [[nodiscard]] TensorViews outputs() const { return (out ? out : in)->views(); }
  [[nodiscard]] TensorView input(std::size_t i) const { return in ? in->views()[i] : TensorView{}; }
  [[nodiscard]] TensorView output(std::size_t i) const {
    return out ? out->views()[i] : TensorView{};
  }
  // The elements of array i from each of n ranks to each rank.
  [[nodiscard]] std::span<const std::size_t> counts_of(std::size_t i, std::size_t n) const {
    return counts.empty() ? counts : std::span(counts).subspan(i * n * n, n * n);
  }
  // The signature of the whole call, in which the ranks compare all arrays.
  [[nodiscard]] Signature signature() const;

 private:
  // Views the arrays, and checks them.
  void view_arrays(const CallArguments& given, const Communicator& ranks, std::optional<int> gpu);
};

}  // namespace fastdist::bindings
