// all_reduce of small arrays by one kernel per rank, through memory that the ranks' GPUs map from
// each other: a few microseconds less than NCCL, up to kMostPeerBytes.
//
// Every rank copies its input into its own memory, tells the others, waits until they have done the
// same, and reduces. Up to a size each rank reads all inputs (one shot); beyond it each rank
// reduces its part and reads the others' results (two shots). Sums are made in rank order, in
// float32, so every rank gets the same bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/types.h"
#include "cuda/buffer.h"
#include "cuda/stream.h"

namespace fastdist::cuda {

inline constexpr int kMostPeers = 8;
inline constexpr int kPeerBlocks = 32;
inline constexpr std::size_t kPeerChunkBytes = std::size_t{16} << 10;  // of a block of threads
inline constexpr std::size_t kMostPeerBytes = kPeerBlocks * kPeerChunkBytes;

// The memory of one rank. Blocks of threads with one number work together, apart from the others:
// each has signals, counts of its steps, and two chunks for inputs and results, of which
// successive calls use one and the other. So one exchange of signals per call suffices: who fills a
// chunk again has seen that all have begun the call after the one that read it.
struct PeerPage {
  struct Block {
    std::uint32_t signals[2][kMostPeers];  // by step and rank: how often the rank has come to it
    std::uint32_t steps[2];                // how often this rank has
    std::uint32_t unused[14];
  };
  struct alignas(16) Chunk {
    std::byte bytes[kPeerChunkBytes];
  };
  Block blocks[kPeerBlocks];
  Chunk inputs[kPeerBlocks][2];
  Chunk results[kPeerBlocks][2];
};

// A kernel's parameter.
struct PeerCall {
  PeerPage* pages[kMostPeers];
  volatile int* is_over;            // on the GPU: the kernels that begin from now on do nothing
  const volatile int* is_given_up;  // on the host, which sets it when ranks are lost
  int rank;
  int size;
  const std::byte* in;
  std::byte* out;
  std::uint32_t count;  // elements
  float factor;         // 1/size for a mean
  bool in_two_shots;
};

// The kernel, with `blocks` blocks of threads, and its loading before NCCL's kernels can be in its
// way.
void reduce_with_peers(DType dtype, const PeerCall& call, int blocks, StreamHandle stream);
void load_peer_kernels();

class PeerMemory {
 public:
  // Allocates this rank's memory on the current device.
  explicit PeerMemory(int rank);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  ~PeerMemory();

  // Returns what the other ranks need to map this rank's memory.
  [[nodiscard]] std::string address() const;
  // Maps the memory of all ranks, by their addresses in rank order. Throws if a GPU cannot reach
  // another's memory. All must have done so before any reduces.
  void open(std::span<const std::string> addresses);

  // Must be called before any rank reduces: others may write here until all have left.
  void begin_use() noexcept { is_in_use_ = true; }
  // Sums and means of float16, bfloat16 and float32 up to kMostPeerBytes.
  [[nodiscard]] static bool can_reduce(const TensorView& array, ReduceOp op) noexcept;
  // Enqueues. Calls must be in one order on the device, the same on all ranks.
  // Captured calls use memory of their own, since a graph may be replayed beside other calls; the
  // replays of all graphs must be in one order too.
  void all_reduce(const TensorView& in, const TensorView& out, ReduceOp op, StreamHandle stream,
                  bool is_captured);
  // Waits up to a second, after the last call, until all ranks have called this. Otherwise they may
  // still use this rank's memory, which then stays allocated until the process ends.
  void leave();
  // Ends the kernels that wait for other ranks; results are then undefined.
  void give_up() noexcept;

 private:
  int rank_;
  int device_;
  std::unique_ptr<DeviceBuffer> own_;
  int* is_over_ = nullptr;                     // of a PeerCall; in `own_`
  int* is_given_up_ = nullptr;                 // of a PeerCall; mapped
  std::array<PeerPage*, kMostPeers> pages_{};  // two of each rank: also for captured calls
  std::array<bool, kMostPeers> is_mapped_{};
  int size_ = 0;
  bool is_in_use_ = false;  // by kernels, of this rank or others
};

}  // namespace fastdist::cuda
