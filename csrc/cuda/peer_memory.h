// all_reduce of arrays up to kMostPeerBytes with one kernel per rank, through memory that the GPUs
// map from each other. It takes a few microseconds less than NCCL.
//
// Every rank copies its input into its own memory, tells the others, waits until they have done the
// same, and reduces. Up to a size each rank reads all inputs (one shot); beyond it each rank
// reduces its part and reads the others' results (two shots). Sums are computed in rank order,
// in float32, so every rank gets the same bits.
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
inline constexpr std::size_t kPeerChunkBytes = std::size_t{16} << 10;  // per thread block
inline constexpr std::size_t kMostPeerBytes = kPeerBlocks * kPeerChunkBytes;

// The memory of one rank. Thread blocks with the same number cooperate, independently of the rest.
// Each has signals, step counts, and two chunks each for inputs and results, which successive calls
// use in turn. So one exchange of signals per call suffices: a rank reuses a chunk only after every
// rank has started the next call.
struct PeerPage {
  struct Block {
    std::uint32_t signals[2][kMostPeers];  // [step][rank]: number of times that rank has reached it
    std::uint32_t steps[2];                // number of times this rank has reached each step
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
  volatile int* is_over;            // on the GPU; once it is set, later kernels do nothing
  const volatile int* is_given_up;  // on the host, which sets it when ranks are lost
  int rank;
  int size;
  const std::byte* in;
  std::byte* out;
  std::uint32_t count;  // elements
  float factor;         // 1/size for a mean
  bool in_two_shots;
};

// Launches the kernel for `dtype` with `blocks` thread blocks.
void reduce_with_peers(DType dtype, const PeerCall& call, int blocks, StreamHandle stream);
// Loads the kernels. Must be called before an NCCL kernel can block loading.
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
  // another's memory. All ranks must have returned before any rank reduces.
  void open(std::span<const std::string> addresses);

  // Must be called before any rank reduces: from then on until all leave, others may write here.
  void begin_use() noexcept { is_in_use_ = true; }
  // Sums and means of float16, bfloat16 and float32 up to kMostPeerBytes.
  [[nodiscard]] static bool can_reduce(const TensorView& array, ReduceOp op) noexcept;
  // Enqueues a call. Calls must run one after another, in the same order on all ranks. Captured
  // calls have their own memory, since a graph may be replayed while other calls run; replays must
  // also run one after another, in the same order on all ranks.
  void all_reduce(const TensorView& in, const TensorView& out, ReduceOp op, StreamHandle stream,
                  bool is_captured);
  // Must be called after the last call. Waits up to a second until all ranks have called this. If
  // one has not, it may still use this rank's memory, which stays allocated until the process ends.
  void leave();
  // Ends the kernels that wait for other ranks; results are then undefined.
  void give_up() noexcept;

 private:
  int rank_;
  int device_;
  std::unique_ptr<DeviceBuffer> own_;
  int* is_over_ = nullptr;                     // of a PeerCall; in `own_`
  int* is_given_up_ = nullptr;                 // of a PeerCall; mapped
  std::array<PeerPage*, kMostPeers> pages_{};  // two per rank: for normal and for captured calls
  std::array<bool, kMostPeers> is_mapped_{};
  int size_ = 0;
  bool is_in_use_ = false;  // by kernels, of this rank or others
};

}  // namespace fastdist::cuda
