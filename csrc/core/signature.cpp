#include "core/signature.h"

#include <string_view>

namespace fastdist {

Signature unpack_signature(std::uint64_t packed, std::uint64_t count, std::uint64_t list) noexcept {
  Signature s;
  s.op = static_cast<Op>(packed & 0x7F);
  s.on_gpu = (packed >> 7 & 1) != 0;
  s.dtype = static_cast<DType>(packed >> 8 & 0xFF);
  s.reduce_op = static_cast<ReduceOp>(packed >> 16 & 0x7);
  s.root = static_cast<std::int16_t>(packed >> 24 & 0xFFFF);
  s.order = static_cast<std::uint16_t>(packed >> 40 & 0xFFFF);
  if (packed >> 56 != 0) s.compress = static_cast<DType>((packed >> 56) - 1);
  s.count = count;
  s.list = list;
  return s;
}

namespace {

std::string_view name_of_compression(DType wire) {
  return wire == DType::kFloat16 ? "fp16" : wire == DType::kBFloat16 ? "bf16" : "fp8";
}

// A word with lengths: its lowest bit is 0, three are the number of axes, and the other 60 are
// shared by the axes.
constexpr std::uint64_t kMostAxes = 6;
constexpr std::uint64_t kIsHash = 7;

std::string name_of_shape(std::uint64_t word) {
  const std::uint64_t axes = word >> 1 & 7;
  const bool has_lengths = axes != 0 && axes <= kMostAxes;  // a stranger's word may have none
  std::string text = has_lengths ? "(" : "#";
  if (!has_lengths) return text += std::to_string(word >> 4);
  const std::uint64_t bits = 60 / axes;
  for (std::uint64_t i = 0; i < axes; ++i) {
    const std::uint64_t length = word >> (4 + bits * i) & ((std::uint64_t{1} << bits) - 1);
    if (i != 0) text += ", ";
    text += std::to_string(length);
  }
  return text + ")";
}

bool has_array(Op op) {
  return !is_one_of(op, {Op::kBarrier, Op::kGroup, Op::kJoin, Op::kBroadcastObject,
                         Op::kAllGatherObject, Op::kGatherObject, Op::kScatterObject, Op::kSplit});
}

bool has_reduction(Op op) {
  return is_one_of(
      op, {Op::kAllReduce, Op::kReduceScatter, Op::kReduceScatterSplits, Op::kReduce, Op::kScan});
}

bool has_root(Op op) {
  return is_one_of(op,
                   {Op::kReduce, Op::kBroadcast, Op::kGather, Op::kScatter, Op::kBroadcastObject,
                    Op::kGatherObject, Op::kScatterObject, Op::kGatherSplits, Op::kScatterSplits});
}

void mix(std::uint64_t& hash, std::uint64_t word) {
  hash = (hash ^ word) * 0xFF51AFD7ED558CCDULL;
  hash ^= hash >> 32;
}

}  // namespace

std::uint64_t word_of_axes(std::span<const std::int64_t> shape) noexcept {
  const std::uint64_t axes = shape.size();
  const std::uint64_t bits = 60 / axes;
  std::uint64_t word = axes << 1;
  std::uint64_t hash = 0x9E3779B97F4A7C15ULL ^ axes;
  bool fits = axes <= kMostAxes;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const auto length = static_cast<std::uint64_t>(shape[i]);
    fits = fits && length >> bits == 0;
    if (fits) word |= length << (4 + bits * i);
    mix(hash, length);
  }
  return fits ? word : hash << 4 | kIsHash << 1;
}

std::string describe(const Signature& s) {
  constexpr std::string_view kSplits = "_splits";
  std::string_view name = name_of(s.op);
  const bool has_splits = name.ends_with(kSplits);
  if (has_splits) name.remove_suffix(kSplits.size());
  std::string text(name);
  text += "(";
  std::string between;
  const auto add = [&](const std::string& what) {
    text += between + what;
    between = ", ";
  };
  if (has_array(s.op)) {
    add(std::string(name_of(s.dtype)) + " × " + std::to_string(s.count));
    if (is_list(s.list) && !has_splits) text += " in a list";
    if (!is_list(s.list) && s.list != 0) text += " of shape " + name_of_shape(s.list);
    if (s.order != 0) text += ", not in row-major order";
    if (s.on_gpu) text += ", on GPUs";
  }
  if (has_reduction(s.op)) add("op=\"" + std::string(name_of(s.reduce_op)) + "\"");
  if (s.compress) add("compress=\"" + std::string(name_of_compression(*s.compress)) + "\"");
  if (has_root(s.op)) add("root=" + std::to_string(s.root));
  if (s.op == Op::kSend) add("dst=" + std::to_string(s.root));
  if (s.op == Op::kRecv) add("src=" + (s.root < 0 ? "any" : std::to_string(s.root)));
  if (s.op == Op::kScan && s.root != 0) add("exclusive=True");
  if (has_splits) add("splits=…");
  return text + ")";
}

std::uint64_t list_word(TensorViews arrays) noexcept {
  std::uint64_t hash = 0x9E3779B97F4A7C15ULL ^ arrays.size();
  std::uint64_t shapes = hash;
  bool is_flat = true;
  for (const TensorView& a : arrays) {
    mix(hash, a.count ^ static_cast<std::uint64_t>(a.dtype) << 56 ^
                  static_cast<std::uint64_t>(a.order) << 40);
    mix(shapes, a.shape);
    is_flat = is_flat && a.shape == 0;
  }
  return hash << 32 | (is_flat ? 0 : shapes & kListShapes) | 1;
}

Signature all_to_all_signature(TensorViews arrays, std::span<const std::size_t> counts) noexcept {
  Signature call = signature_of({.op = Op::kAllToAll}, arrays);
  if (counts.empty()) return call;
  std::uint64_t hash = 0x9E3779B97F4A7C15ULL ^ arrays.size();
  for (const std::size_t c : counts) mix(hash, c);
  for (const TensorView& a : arrays) mix(hash, static_cast<std::uint64_t>(a.dtype));
  call.count = 0;
  call.list = hash | 1;
  return call;
}

}  // namespace fastdist
