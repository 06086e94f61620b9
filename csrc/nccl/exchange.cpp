// Reductions that NCCL lacks, as an exchange of parts: each rank sends every other rank the part
// that the other rank reduces, a kernel reduces by the tree over ranks, and the results are sent to
// their destinations. An exchange sends twice the bytes of the array, as a ring does, and gives the
// same bits on every rank.
//
// An array goes through the scratch memory in chunks. A chunk is cut into one part per rank; each
// part is a multiple of 16 bytes except for the last ones, which may be smaller or empty.

#include <algorithm>

#include "cuda/check.h"
#include "nccl/communicator.h"

namespace fastdist::nccl {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{16} << 20;

std::size_t in_quanta(std::size_t bytes) { return round_up(bytes, cuda::kQuantumBytes); }

struct Range {
  std::size_t begin;
  std::size_t bytes;
};

// Returns rank p's part of a chunk cut into parts of `part` bytes.
Range part_of(std::size_t chunk, std::size_t part, int p) {
  const std::size_t begin = std::min(chunk, static_cast<std::size_t>(p) * part);
  return {begin, std::min(part, chunk - begin)};
}

}  // namespace

// Returns the bytes of scratch memory that an exchange of an array needs; 0 if NCCL reduces it.
std::size_t NcclCommunicator::exchange_bytes(DType dtype, std::size_t bytes, ReduceOp op) const {
  if (bytes == 0 || native_reduction(dtype, op)) return 0;
  const auto n = static_cast<std::size_t>(size_);
  return (n + 1) * in_quanta((std::min(bytes, kChunkBytes) + n - 1) / n);
}

void NcclCommunicator::reserve_gathered(std::size_t bytes, const CallOptions& options) {
  if (bytes == 0) return;
  ScratchUse scratch(*this, stream_of(options));
  (void)scratch->gathered(bytes, options, checker_);
}

// Reduces the blocks at `gathered`, one per rank, into the block behind them.
void NcclCommunicator::reduce_gathered(std::byte* gathered, std::size_t stride, std::size_t bytes,
                                       DType dtype, ReduceOp op, StreamHandle stream) {
  cuda::reduce_blocks(dtype, op, gathered, stride, size_,
                      gathered + static_cast<std::size_t>(size_) * stride, in_quanta(bytes),
                      stream);
}

void NcclCommunicator::exchange_reduce(const TensorView& in, const TensorView& out, ReduceOp op,
                                       std::optional<int> root, const CallOptions& options) {
  const OutsideGroups outside(*this, options);
  const StreamHandle stream = stream_of(options);
  const auto n = static_cast<std::size_t>(size_);
  ScratchUse scratch(*this, stream);
  std::byte* const gathered =
      scratch->gathered(exchange_bytes(in.dtype, in.bytes(), op), options, checker_);
  for (std::size_t done = 0; done < in.bytes(); done += kChunkBytes) {
    const std::size_t chunk = std::min(in.bytes() - done, kChunkBytes);
    const std::size_t part = in_quanta((chunk + n - 1) / n);
    const Range own = part_of(chunk, part, rank_);
    Group inputs(*this, options);
    for (int p = 0; p < size_; ++p) {
      const Range range = part_of(chunk, part, p);
      give(in.data + done + range.begin, range.bytes, p, options);
      take(gathered + static_cast<std::size_t>(p) * part, own.bytes, p, options);
    }
    inputs.end();
    reduce_gathered(gathered, part, own.bytes, in.dtype, op, stream);
    Group results(*this, options);
    for (int p = 0; p < size_; ++p) {
      const Range range = part_of(chunk, part, p);
      if (!root || p == *root) give(gathered + n * part, own.bytes, p, options);
      if (!root || rank_ == *root) take(out.data + done + range.begin, range.bytes, p, options);
    }
    results.end();
  }
  scratch.end();
}

void NcclCommunicator::exchange_reduce_scatter(const TensorView& in, const TensorView& out,
                                               ReduceOp op, const CallOptions& options) {
  const OutsideGroups outside(*this, options);
  const StreamHandle stream = stream_of(options);
  const auto n = static_cast<std::size_t>(size_);
  // Bytes of each rank's part per chunk; a multiple of 16 bytes, so whole elements of any dtype.
  const std::size_t step = std::max(in_quanta(kChunkBytes / n), cuda::kQuantumBytes);
  const std::size_t stride = in_quanta(std::min(out.bytes(), step));
  ScratchUse scratch(*this, stream);
  std::byte* const gathered = scratch->gathered((n + 1) * stride, options, checker_);
  for (std::size_t done = 0; done < out.bytes(); done += step) {
    const std::size_t bytes = std::min(out.bytes() - done, step);
    Group inputs(*this, options);
    for (int p = 0; p < size_; ++p) {
      const auto rank = static_cast<std::size_t>(p);
      give(in.data + rank * out.bytes() + done, bytes, p, options);
      take(gathered + rank * stride, bytes, p, options);
    }
    inputs.end();
    reduce_gathered(gathered, stride, bytes, in.dtype, op, stream);
    FASTDIST_CUDA_CHECK(cudaMemcpyAsync(out.data + done, gathered + n * stride, bytes,
                                        cudaMemcpyDeviceToDevice, stream));
  }
  scratch.end();
}

}  // namespace fastdist::nccl
