// cuda/kernels.h for virtual GPUs: the kernels' CPU twins, enqueued on virtual streams.

#include "cuda/kernels.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "cpp/kernel_twin.h"
#include "cuda/check.h"
#include "host/kernels.h"
#include "virtual_gpu/cuda/work.h"

namespace fastdist::cuda {
namespace {

// Launches on the current device; rejects streams of other devices.
template <class Kernel>
void launch(StreamHandle stream, Kernel kernel) {
  int device = 0;
  FASTDIST_CUDA_CHECK(cudaGetDevice(&device));
  check(virtual_gpu::enqueue(stream, device, [kernel, device] { kernel(device); }),
        "launch of a kernel(");
}

void check_moves(const Moves& moves, int device) {
  if (moves.moves.size() > kMostPieces) throw std::logic_error("too many pieces for one launch");
  for (const Move& move : moves.moves) {
    virtual_gpu::check_memory(move.array, move.count * size_of(static_cast<DType>(move.dtype)),
                              device);
  }
}

void check_bucket(const Moves& moves, const std::byte* bucket, DType dtype, int device) {
  if (reinterpret_cast<std::uintptr_t>(bucket) % kQuantumBytes != 0) {
    throw virtual_gpu::Failure(cudaErrorIllegalAddress, "a bucket that is not aligned");
  }
  for (const Move& move : moves.moves) {
    const std::size_t bytes = move.count * size_of(dtype);
    const std::size_t quanta = (bytes + kQuantumBytes - 1) / kQuantumBytes;
    virtual_gpu::check_memory(bucket + std::size_t{move.at} * kQuantumBytes, quanta * kQuantumBytes,
                              device);
  }
}

// Magnitudes by the index of the array in the list, as many as the moves refer to.
std::vector<float> scales_of(const Moves& moves, const Cast& cast, int device) {
  std::vector<float> scales;
  for (const Move& move : moves.moves) {
    if (move.index >= scales.size()) scales.resize(move.index + 1, 1.0F);
    if (cast.magnitudes == nullptr) continue;
    virtual_gpu::check_memory(cast.magnitudes + move.index, sizeof(float), device);
    scales[move.index] = test::scale_of(cast.magnitudes[move.index], cast.ranks, cast.dtype);
  }
  return scales;
}

// |x| as the bits of a float, in which NaN is above all numbers.
std::uint32_t magnitude_bits(const Move& move) {
  const auto largest = static_cast<float>(
      host::largest_magnitude(static_cast<DType>(move.dtype), move.array, move.count));
  const float positive = std::fabs(largest);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &positive, sizeof(bits));
  return bits;
}

bool has_kernel(DType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      return true;
    case ReduceOp::kProd:
      if (dtype == DType::kComplex64 || dtype == DType::kComplex128) return true;
      break;
    case ReduceOp::kSum:
    case ReduceOp::kMean:
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      break;
  }
  return dtype == DType::kInt16 || dtype == DType::kUInt16 || dtype == DType::kFloat8E4M3FN ||
         dtype == DType::kFloat8E5M2;
}

}  // namespace

void load_packing_kernels() {}
void load_reduction_kernels() {}

void pack(const Moves& moves, std::byte* bucket, const Cast& cast, StreamHandle stream) {
  if (moves.tiles == 0) return;
  launch(stream, [moves, bucket, cast](int device) {
    check_moves(moves, device);
    check_bucket(moves, bucket, cast.dtype, device);
    test::pack_twin(moves, bucket, cast.dtype, scales_of(moves, cast, device));
  });
}

void unpack(const Moves& moves, const std::byte* bucket, const Cast& cast, StreamHandle stream) {
  if (moves.tiles == 0) return;
  launch(stream, [moves, bucket = const_cast<std::byte*>(bucket), cast](int device) {
    check_moves(moves, device);
    check_bucket(moves, bucket, cast.dtype, device);
    test::unpack_twin(moves, bucket, cast.dtype, cast.factor, scales_of(moves, cast, device));
  });
}

void measure(const Moves& moves, DType, float* magnitudes, StreamHandle stream) {
  if (moves.tiles == 0) return;
  launch(stream, [moves, magnitudes](int device) {
    check_moves(moves, device);
    for (const Move& move : moves.moves) {
      virtual_gpu::check_memory(magnitudes + move.index, sizeof(float), device);
      std::uint32_t bits = 0;
      std::memcpy(&bits, magnitudes + move.index, sizeof(bits));
      bits = std::max(bits, magnitude_bits(move));
      std::memcpy(magnitudes + move.index, &bits, sizeof(bits));
    }
  });
}

void reduce_blocks(DType dtype, ReduceOp op, const std::byte* blocks, std::size_t stride, int count,
                   std::byte* out, std::size_t bytes, StreamHandle stream) {
  if (bytes == 0) return;
  if (!has_kernel(dtype, op)) {
    throw Error(ErrorCode::kUnsupported, "op=\"" + std::string(name_of(op)) + "\" of " +
                                             std::string(name_of(dtype)) + " has no kernel");
  }
  launch(stream, [=](int device) {
    std::vector<const std::byte*> sources;
    for (int k = 0; k < count; ++k) {
      sources.push_back(blocks + static_cast<std::size_t>(k) * stride);
      virtual_gpu::check_memory(sources.back(), bytes, device);
      if (reinterpret_cast<std::uintptr_t>(sources.back()) % kQuantumBytes != 0) {
        throw virtual_gpu::Failure(cudaErrorIllegalAddress, "a block that is not aligned");
      }
    }
    virtual_gpu::check_memory(out, bytes, device);
    if (bytes % kQuantumBytes != 0) throw std::logic_error("blocks must be multiples of 16 bytes");
    // Bitwise operations do not depend on the dtype.
    const bool is_logic = op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
    const DType as = is_logic ? DType::kUInt8 : dtype;
    host::reduce(as, op, out, nullptr, sources, bytes / size_of(as));
  });
}

}  // namespace fastdist::cuda
