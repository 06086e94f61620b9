#include "bindings/call.h"

#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "bindings/arguments.h"
#include "core/error.h"
#include "nccl/reductions.h"

namespace fastdist::bindings {
namespace {

struct Name {
  const char* text;
  py::handle CallArguments::* value;
};

// In the order in which callers pass them.
constexpr std::array kNames{
    Name{"array", &CallArguments::array},       Name{"op", &CallArguments::reduce_op},
    Name{"root", &CallArguments::root},         Name{"dst", &CallArguments::dst},
    Name{"src", &CallArguments::src},           Name{"tag", &CallArguments::tag},
    Name{"out", &CallArguments::out},           Name{"compress", &CallArguments::compress},
    Name{"counts", &CallArguments::counts},     Name{"bucket_bytes", &CallArguments::bucket_bytes},
    Name{"stream", &CallArguments::stream},     Name{"timeout", &CallArguments::timeout},
    Name{"async_op", &CallArguments::async_op}, Name{"within", &CallArguments::within},
};

using Interned = std::array<PyObject*, kNames.size()>;

const Interned& interned_names() {
  static const Interned names = [] {
    Interned made{};
    for (std::size_t i = 0; i < made.size(); ++i) {
      made[i] = PyUnicode_InternFromString(kNames[i].text);
      if (made[i] == nullptr) throw py::error_already_set();
    }
    return made;
  }();
  return names;
}

// Returns the position of a name that is not interned, or not passed in the usual order.
std::size_t position_of(PyObject* name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (PyUnicode_CompareWithASCIIString(name, kNames[i].text) == 0) return i;
  }
  refuse(ErrorCode::kType, "collectives have no argument ", std::string(py::repr(name)));
}

// Where the values of a call's keywords go, in the order of the tuple of their names.
struct Layout {
  PyObject* keywords;
  std::size_t count;
  std::array<py::handle CallArguments::*, kNames.size()> values{};
};

Layout layout_of(PyObject* keywords) {
  const Interned& names = interned_names();
  Layout layout{keywords, static_cast<std::size_t>(PyTuple_GET_SIZE(keywords))};
  std::size_t at = 0;
  for (std::size_t i = 0; i < layout.count; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(keywords, static_cast<Py_ssize_t>(i));
    while (at < names.size() && names[at] != name) ++at;
    if (at == names.size()) at = position_of(name);
    layout.values[i] = kNames[at].value;
  }
  return layout;
}

// Returns the cached layout of `keywords`, if that is one of the first few tuples in calls of `op`.
// Each calling line of Python has one tuple, which is kept so that no other gets its address. The
// cache saves a tenth of the time of a small collective.
const Layout* find_layout(Op op, PyObject* keywords) {
  constexpr std::size_t kMost = 4;
  static std::array<std::array<std::atomic<const Layout*>, kMost>, kOpCount> known;
  for (auto& slot : known[static_cast<std::size_t>(op)]) {
    const Layout* layout = slot.load(std::memory_order_acquire);
    if (layout == nullptr) {
      auto made = std::make_unique<const Layout>(layout_of(keywords));
      if (slot.compare_exchange_strong(layout, made.get())) {
        Py_INCREF(keywords);
        return made.release();
      }
    }
    if (layout->keywords == keywords) return layout;
  }
  return nullptr;
}

bool reduces(Op op) {
  return op == Op::kAllReduce || op == Op::kReduce || op == Op::kReduceScatter;
}

bool is_rooted(Op op) {
  return op == Op::kReduce || op == Op::kBroadcast || op == Op::kGather || op == Op::kScatter;
}

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

void check_compressible(const Arrays& arrays, ReduceOp op) {
  if (op != ReduceOp::kSum && op != ReduceOp::kMean) {
    refuse(ErrorCode::kValue, "compress works with op=\"sum\" or \"mean\", got op=\"", name_of(op),
           "\"");
  }
  for (const TensorView& a : arrays.views()) {
    if (a.dtype == DType::kFloat32 || a.dtype == DType::kFloat64) continue;
    refuse(ErrorCode::kType, "compress works on float32 and float64 arrays, got ",
           name_of(a.dtype));
  }
}

void refuse_tag_on_gpus(std::uint64_t tag) {
  if (tag == 0) return;
  refuse(ErrorCode::kUnsupported, "messages on GPUs have no tags, got tag=", tag);
}

void check_row_major(const Arrays& arrays) {
  for (const TensorView& view : arrays.views()) {
    if (view.order == 0) continue;
    refuse(ErrorCode::kValue, arrays.argument(),
           " must be in row-major order, since it is split or joined along axis 0; call "
           "numpy.ascontiguousarray(x) or x.contiguous() first");
  }
}

// Throws unless `whole` has room for a `part` of every rank, and `part` shares no memory with
// `whole` or is this rank's slice of it.
void check_sizes(Op op, const Arrays& part, const Arrays& whole, const Communicator& ranks) {
  const auto size = static_cast<std::size_t>(ranks.size());
  const auto rank = static_cast<std::size_t>(ranks.rank());
  check_row_major(part);
  check_row_major(whole);
  check_same_count(part, whole);
  std::vector<TensorView> apart;  // parts that are not slices of their whole
  for (std::size_t i = 0; i < part.views().size(); ++i) {
    const TensorView& one = part.views()[i];
    const TensorView& all = whole.views()[i];
    if (one.data != all.data + rank * one.bytes()) apart.push_back(one);
    if (one.dtype == all.dtype && one.count * size == all.count) continue;
    refuse(ErrorCode::kValue, name_of(op), ": ", whole.argument(), " must hold every rank's ",
           part.argument(), ": expected ", size, " × ", text_of(one), ", got ", text_of(all));
  }
  if (!apart.empty()) check_no_overlap(apart, whole);
}

void check_all_to_all(const Arrays& in, const Arrays& to, const std::vector<std::size_t>& counts,
                      const Communicator& ranks) {
  const auto n = static_cast<std::size_t>(ranks.size());
  const auto r = static_cast<std::size_t>(ranks.rank());
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
      refuse(ErrorCode::kValue, "all_to_all: ", from.count, " elements cannot be split among ", n,
             " ranks; pass splits=");
    }
    std::size_t sent = even ? from.count : 0;
    std::size_t received = sent;
    for (std::size_t p = 0; p < n && !even; ++p) {
      sent += counts[(i * n + r) * n + p];
      received += counts[(i * n + p) * n + r];
    }
    if (from.dtype == into.dtype && from.count == sent && into.count == received) continue;
    refuse(ErrorCode::kValue, "all_to_all: array must hold the ", sent,
           " elements to send, and out, in its dtype, the ", received, " to receive; got ",
           text_of(from), " and ", text_of(into));
  }
  check_no_overlap(in.views(), to);
}

}  // namespace

std::size_t to_bucket_bytes(const CallArguments& given) {
  PyObject* const value = given.bucket_bytes.ptr();
  if (value == nullptr) return 0;
  if (PyUnicode_Check(value) != 0 && PyUnicode_CompareWithASCIIString(value, "auto") == 0) return 0;
  const Py_ssize_t bytes = PyNumber_AsSsize_t(value, nullptr);
  if (bytes > 0) return static_cast<std::size_t>(bytes);
  throw_unexpected("bucket_bytes must be \"auto\" or a positive integer", value);
}

CallArguments::CallArguments(Op op, py::handle default_timeout, PyObject* const* values,
                             Py_ssize_t positional, PyObject* keywords)
    : op(op) {
  if (positional > 1) {
    refuse(ErrorCode::kType, "expected the array and keywords, got ", positional,
           " positional arguments");
  }
  if (positional == 1) array = values[0];
  const auto take = [&](const Layout& layout) {
    for (std::size_t i = 0; i < layout.count; ++i) this->*layout.values[i] = values[positional + i];
  };
  if (keywords != nullptr) {
    const Layout* const known = find_layout(op, keywords);
    known != nullptr ? take(*known) : take(layout_of(keywords));
  }
  if (timeout.is_none()) timeout = default_timeout;
}

py::dict CallArguments::by_name() const {
  refuse_tag_on_gpus(to_tag(tag));
  py::dict result;
  for (const Name& name : kNames) {
    const py::handle value = this->*name.value;
    const bool is_known = name.value != &CallArguments::tag && name.value != &CallArguments::within;
    if (value && !value.is_none() && is_known) result[name.text] = value;
  }
  return result;
}

py::object CallArguments::own() {
  py::list kept;
  for (const Name& name : kNames) {
    py::handle& value = this->*name.value;
    if (!value || value.is_none()) continue;
    if (PyList_Check(value.ptr()) != 0) {
      kept.append(py::reinterpret_steal<py::object>(PyList_AsTuple(value.ptr())));
      value = kept[kept.size() - 1];
    } else {
      kept.append(value);
    }
  }
  return kept;
}

Call::Call(const CallArguments& given, const Communicator& ranks, std::optional<int> gpu)
    : op(given.op),
      timeout(to_duration(given.timeout)),
      is_async(is_true(given.async_op)),
      result(given.result()) {
  if (reduces(op)) reduce_op = to_reduce_op(given.reduce_op);
  const bool is_message = op == Op::kSend || op == Op::kRecv;
  const bool is_step = !given.within.is_none();
  if (is_rooted(op) || (is_step && !given.root.is_none())) {
    peer = to_rank(given.root, "root", ranks.size());
  }
  const bool may_be_own = given.in_group || !gpu;
  const auto self = may_be_own ? std::nullopt : std::optional(ranks.rank());
  if (op == Op::kSend) peer = to_rank(given.dst, "dst", ranks.size(), self);
  if (op == Op::kRecv) peer = to_rank(given.src, "src", ranks.size(), self);
  tag = to_tag(given.tag, is_message && is_step);
  if (gpu) refuse_tag_on_gpus(tag);
  if (!given.counts.is_none()) counts = given.counts.cast<std::vector<std::size_t>>();
  view_arrays(given, ranks, gpu);
  if (!given.compress.is_none()) wire = to_wire_dtype(given.compress);
  if (wire == DType::kFloat8E4M3FN && gpu) {
    throw Error(
        ErrorCode::kUnsupported,
        "compress=\"fp8\" is for arrays in host memory, since NCCL would round the sum after "
        "every rank; use \"bf16\" on GPUs");
  }
  if (wire && op == Op::kAllReduce) check_compressible(*in, reduce_op);
  bucket_bytes = to_bucket_bytes(given);
  if (is_step && !is_message) within = op_from_name(given.within.cast<std::string>());
}

void Call::view_arrays(const CallArguments& given, const Communicator& ranks,
                       std::optional<int> gpu) {
  const bool is_root = !is_rooted(op) || ranks.rank() == peer;
  const bool in_place = given.out.is_none();
  const auto read = [&] { in.emplace(given.array, Access::kRead, "array", gpu); };
  const auto write = [&] { out.emplace(given.out, Access::kWrite, "out", gpu); };
  const auto write_array = [&] { out.emplace(given.array, Access::kWrite, "array", gpu); };
  switch (op) {
    case Op::kAllReduce:
    case Op::kReduce:
      in.emplace(given.array, is_root && in_place ? Access::kWrite : Access::kRead, "array", gpu);
      if (is_root && !in_place) write();
      if (out) check_fits(*in, *out);
      break;
    case Op::kBroadcast:
      if (is_root) read();
      if (!in_place) write();
      if (!is_root && in_place) write_array();
      if (in && out) check_fits(*in, *out);
      break;
    case Op::kAllGather:
    case Op::kGather:
      read();
      if (!is_root) return check_row_major(*in);
      write();
      return check_sizes(op, *in, *out, ranks);
    case Op::kScatter:
    case Op::kReduceScatter:
      if (is_root) read();
      write();
      if (!is_root) return check_row_major(*out);
      check_sizes(op, *out, *in, ranks);
      break;
    case Op::kAllToAll:
      read();
      write();
      return check_all_to_all(*in, *out, counts, ranks);
    case Op::kSend:
      return read();
    case Op::kRecv:
      return write_array();
    default:
      return;
  }
  if (!reduces(op)) return;
  for (const TensorView& view : in->views()) {
    check_reducible(reduce_op, view.dtype);
    if (gpu) (void)nccl::native_reduction(view.dtype, reduce_op);
  }
}

Signature Call::signature() const {
  if (op == Op::kAllToAll) return all_to_all_signature(in->views(), counts);
  const std::optional<Arrays>& shared = op == Op::kScatter || !in ? out : in;
  return signature_of(rooted(within.value_or(op), peer, reduce_op), shared->views());
}

}  // namespace fastdist::bindings
