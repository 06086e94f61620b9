// Element types, reductions, operations and views of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>

namespace fastdist {

enum class DType : std::uint8_t {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
};
inline constexpr int kDTypeCount = 17;

enum class ReduceOp : std::uint8_t { kSum, kMean, kProd, kMin, kMax, kAnd, kOr, kXor };
inline constexpr int kReduceOpCount = 8;

enum class Op : std::uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kSend,
  kRecv,
  kBarrier,
  kEmpty,  // allocation of memory that the engine can use in place
  kGroup,  // calls that are launched as one
  kJoin,   // a rank that has no more data takes part in the calls of others
  // Calls that Python makes of others, which are compared as what they are.
  kScan,
  kBroadcastObject,
  kAllGatherObject,
  kGatherObject,
  kScatterObject,
  kSplit,
  kAllGatherSplits,
  kGatherSplits,
  kScatterSplits,
  kReduceScatterSplits,
  kAllToAllSplits,
};
inline constexpr int kOpCount = 25;
inline constexpr int kCollectiveCount = 11;  // those that users call, which come first

[[nodiscard]] constexpr bool is_one_of(Op op, std::initializer_list<Op> ops) noexcept {
  return std::ranges::find(ops, op) != ops.end();
}

[[nodiscard]] constexpr std::size_t round_up(std::size_t value, std::size_t unit) noexcept {
  return (value + unit - 1) / unit * unit;
}

[[nodiscard]] std::size_t size_of(DType dtype) noexcept;
[[nodiscard]] std::string_view name_of(DType dtype) noexcept;
[[nodiscard]] std::string_view name_of(ReduceOp op) noexcept;
[[nodiscard]] std::string_view name_of(Op op) noexcept;
[[nodiscard]] std::optional<DType> dtype_from_name(std::string_view name) noexcept;
[[nodiscard]] std::optional<ReduceOp> reduce_op_from_name(std::string_view name) noexcept;
[[nodiscard]] std::optional<Op> op_from_name(std::string_view name) noexcept;

// Throws kType if the reduction is not defined for the dtype.
void check_reducible(ReduceOp op, DType dtype);

// A dense array: `count` elements at `data`, not owned.
struct TensorView {
  std::byte* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::kUInt8;
  // 0 for row-major order; otherwise a hash of the order of the axes in memory.
  std::uint32_t order = 0;
  std::uint64_t shape = 0;  // of an array of several axes, see `shape_word` in signature.h

  [[nodiscard]] std::size_t bytes() const noexcept { return count * size_of(dtype); }
};

using TensorViews = std::span<const TensorView>;

}  // namespace fastdist
