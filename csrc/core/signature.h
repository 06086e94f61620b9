// What a rank says it is calling; ranks compare these before any byte of data moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/types.h"

namespace fastdist {

inline constexpr int kPhases = 32;

struct Signature {
  Op op = Op::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::int16_t root = 0;
  std::uint16_t order = 0;  // axis order, 0 is row-major
  std::uint64_t count = 0;  // elements of this rank's argument
  std::uint64_t list = 0;   // 0 for one array; else a hash of every array's count and dtype
  std::optional<DType> compress = {};  // what all_reduce sends instead of `dtype`
  std::uint8_t phase = 0;              // of the caller's program, see HostCommunicator::set_phase
  bool on_gpu = false;                 // where the arrays lie

  // Everything but count and list in one word.
  [[nodiscard]] std::uint64_t packed() const noexcept {
    return static_cast<std::uint64_t>(op) | static_cast<std::uint64_t>(on_gpu) << 7 |
           static_cast<std::uint64_t>(dtype) << 8 | static_cast<std::uint64_t>(reduce_op) << 16 |
           static_cast<std::uint64_t>(phase % kPhases) << 19 |
           static_cast<std::uint64_t>(static_cast<std::uint16_t>(root)) << 24 |
           static_cast<std::uint64_t>(order) << 40 |
           (compress ? static_cast<std::uint64_t>(*compress) + 1 : 0) << 56;
  }
};

[[nodiscard]] Signature unpack_signature(std::uint64_t packed, std::uint64_t count,
                                         std::uint64_t list) noexcept;

// For people: `all_reduce(float32 × 1024, op="sum")`.
[[nodiscard]] std::string describe(const Signature& signature);

// The hash that `Signature::list` holds for a list of arrays; never 0.
[[nodiscard]] std::uint64_t list_hash(TensorViews arrays) noexcept;

// What it holds where the ranks' arrays differ in size: the tables of an all_to_all must agree.
[[nodiscard]] std::uint64_t table_hash(std::span<const std::size_t> counts,
                                       TensorViews arrays) noexcept;

// `call` on all of these arrays at once.
[[nodiscard]] Signature signature_of(Signature call, TensorViews arrays) noexcept;

}  // namespace fastdist
