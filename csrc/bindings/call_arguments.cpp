#include "bindings/call_arguments.h"

#include <optional>
#include <vector>

#include "bindings/arguments.h"
#include "core/error.h"

namespace py = pybind11;

namespace fastdist::bindings {

ReduceOp to_reduce_op(py::handle name) {
  Py_ssize_t length = 0;
  const char* text =
      PyUnicode_Check(name.ptr()) != 0 ? PyUnicode_AsUTF8AndSize(name.ptr(), &length) : nullptr;
  const auto op = text == nullptr ? std::nullopt
                                  : reduce_op_from_name({text, static_cast<std::size_t>(length)});
  if (op) return *op;
  throw Error(ErrorCode::kValue, hint("unknown_op", name));
}

DType to_wire_dtype(py::handle name) {
  const auto text = py::str(name).cast<std::string>();
  if (text == "fp16") return DType::kFloat16;
  if (text == "bf16") return DType::kBFloat16;
  if (text == "fp8") return DType::kFloat8E4M3FN;
  throw_unexpected("compress must be None, fp16, bf16 or fp8", name);
}

void check_reducible_all(ReduceOp op, TensorViews arrays) {
  for (const TensorView& a : arrays) check_reducible(op, a.dtype);
}

namespace {

std::string text_of(const TensorView& view) {
  return std::string(name_of(view.dtype)) + " × " + std::to_string(view.count);
}

}  // namespace

void check_row_major(const Arrays& arrays) {
  for (const TensorView& view : arrays.views()) {
    if (view.order == 0) continue;
    throw Error(ErrorCode::kValue,
                std::string(arrays.argument()) +
                    " must be in row-major order, since it is split or joined along axis 0; call "
                    "numpy.ascontiguousarray(x) or x.contiguous() first");
  }
}

void check_sizes(const char* op, const Arrays& part, const Arrays& whole, int rank, int ranks) {
  check_row_major(part);
  check_row_major(whole);
  check_same_count(part, whole);
  std::vector<TensorView> apart;  // parts that are not this rank's part of the whole itself
  for (std::size_t i = 0; i < part.views().size(); ++i) {
    const TensorView& one = part.views()[i];
    const TensorView& all = whole.views()[i];
    if (one.data != all.data + static_cast<std::size_t>(rank) * one.bytes()) apart.push_back(one);
    if (one.dtype == all.dtype && one.count * static_cast<std::size_t>(ranks) == all.count)
      continue;
    throw Error(ErrorCode::kValue, std::string(op) + ": " + whole.argument() +
                                       " must hold every rank's " + part.argument() +
                                       ": expected " + std::to_string(ranks) + " × " +
                                       text_of(one) + ", got " + text_of(all));
  }
  if (!apart.empty()) check_no_overlap(apart, whole);
}

void check_all_to_all(const Arrays& in, const Arrays& to, const std::vector<std::size_t>& counts,
                      std::size_t n, std::size_t r) {
  check_row_major(in);
  check_row_major(to);
  check_same_count(in, to);
  const std::size_t arrays = in.views().size();
  const bool even = counts.empty();
  if (!even && counts.size() != arrays * n * n) {
    throw Error(ErrorCode::kValue, "counts must be a table n × n for each array");
  }
  for (std::size_t i = 0; i < arrays; ++i) {
    const TensorView& from = in.views()[i];
    const TensorView& into = to.views()[i];
    if (even && from.count % n != 0) {
      throw Error(ErrorCode::kValue, "all_to_all: " + std::to_string(from.count) +
                                         " elements cannot be split among " + std::to_string(n) +
                                         " ranks; pass splits=");
    }
    std::size_t sent = even ? from.count : 0;
    std::size_t received = sent;
    for (std::size_t p = 0; p < n && !even; ++p) {
      sent += counts[(i * n + r) * n + p];
      received += counts[(i * n + p) * n + r];
    }
    if (from.dtype == into.dtype && from.count == sent && into.count == received) continue;
    throw Error(ErrorCode::kValue, "all_to_all: array must hold the " + std::to_string(sent) +
                                       " elements to send, and out, in its dtype, the " +
                                       std::to_string(received) + " to receive; got " +
                                       text_of(from) + " and " + text_of(into));
  }
  check_no_overlap(in.views(), to);
}

}  // namespace fastdist::bindings
