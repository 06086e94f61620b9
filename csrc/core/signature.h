// The signature of a call, which ranks compare before any data moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/types.h"

namespace fastdist {

struct Signature {
  Op op = Op::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::int16_t root = 0;
  std::uint16_t order = 0;  // axis order, 0 is row-major
  std::uint64_t count = 0;  // elements of this rank's argument
  // Of one array its shape, see `shape_word`; of a list an odd word, see `list_word`.
  std::uint64_t list = 0;
  std::optional<DType> compress = {};  // the dtype that all_reduce sends instead of `dtype`
  bool on_gpu = false;

  // Packs all fields but count and list into one word.
  [[nodiscard]] std::uint64_t packed() const noexcept {
    return static_cast<std::uint64_t>(op) | static_cast<std::uint64_t>(on_gpu) << 7 |
           static_cast<std::uint64_t>(dtype) << 8 | static_cast<std::uint64_t>(reduce_op) << 16 |
           static_cast<std::uint64_t>(static_cast<std::uint16_t>(root)) << 24 |
           static_cast<std::uint64_t>(order) << 40 |
           (compress ? static_cast<std::uint64_t>(*compress) + 1 : 0) << 56;
  }
};

[[nodiscard]] Signature unpack_signature(std::uint64_t packed, std::uint64_t count,
                                         std::uint64_t list) noexcept;

// Describes a signature for messages: `all_reduce(float32 × 1024, op="sum")`.
[[nodiscard]] std::string describe(const Signature& signature);

// Of a list of arrays: a hash of all counts, dtypes and orders, and below it `kListShapes`, a hash
// of all shapes, which is 0 if all arrays are flat.
inline constexpr std::uint64_t kListShapes = 0xFFFFFFFE;
[[nodiscard]] std::uint64_t list_word(TensorViews arrays) noexcept;

[[nodiscard]] constexpr bool is_list(std::uint64_t list) noexcept { return (list & 1) != 0; }

// Returns an even word: 0 for a flat array, all lengths if they are few and small, else a hash.
[[nodiscard]] std::uint64_t word_of_axes(std::span<const std::int64_t> shape) noexcept;
[[nodiscard]] inline std::uint64_t shape_word(std::span<const std::int64_t> shape) noexcept {
  return shape.size() < 2 ? 0 : word_of_axes(shape);
}

// Compares the `list` of one more rank with the word that `common` keeps of the ranks before. A
// flat array matches any shape of its size, and a list of flat arrays any list of their sizes;
// every rank comes to the same result.
[[nodiscard]] constexpr bool matches(std::uint64_t& common, std::uint64_t list) noexcept {
  if (list == common) return true;
  const std::uint64_t shapes = is_list(list) ? kListShapes : ~std::uint64_t{1};
  if ((list & ~shapes) != (common & ~shapes)) return false;
  if ((common & shapes) == 0) common = list;
  return list == common || (list & shapes) == 0;
}

[[nodiscard]] constexpr Signature rooted(Op op, int root,
                                         ReduceOp reduce_op = ReduceOp::kSum) noexcept {
  return {.op = op, .reduce_op = reduce_op, .root = static_cast<std::int16_t>(root)};
}

// Returns `call` with the fields that describe `arrays` filled in. Inline: a copy of a signature
// waits for the stores of its fields.
[[nodiscard]] inline Signature signature_of(Signature call, TensorViews arrays) noexcept {
  if (arrays.size() == 1) {
    call.order = static_cast<std::uint16_t>(arrays[0].order);
    call.list = arrays[0].shape;
  } else {
    call.list = list_word(arrays);
  }
  if (!arrays.empty()) call.dtype = arrays[0].dtype;
  call.count = 0;
  for (const TensorView& a : arrays) call.count += a.count;
  return call;
}

// Of an all_to_all. With `counts` the ranks' arrays may differ in size, but the table must agree.
[[nodiscard]] Signature all_to_all_signature(TensorViews arrays,
                                             std::span<const std::size_t> counts) noexcept;

}  // namespace fastdist
