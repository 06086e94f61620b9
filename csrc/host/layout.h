// The layout of one rank's block of shared memory. Zero bytes are the initial state.
//
//   Control | Lane × ranks | 2 slots | ring of inputs | ring of results | ring of sends × ranks
//
// Words that the owner writes and all ranks read are counters that only grow. A collective is
// identified by its sequence number, and progress within it is counted in rounds;
// `progress(sequence, round)` orders both, so a counter is never reset.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/failure.h"
#include "host/signal.h"

namespace fastdist::host {

using Counter = std::atomic<std::uint64_t>;

inline constexpr std::uint64_t kRoundBits = 24;
inline constexpr std::uint64_t kAllRounds = (std::uint64_t{1} << kRoundBits) - 1;

[[nodiscard]] constexpr std::uint64_t progress(std::uint64_t sequence,
                                               std::uint64_t round) noexcept {
  return sequence << kRoundBits | round;
}

// The state of a rank in a communicator. The last two say that `Control::failure` is set.
enum class RankState : std::uint32_t {
  kActive,
  kClosed,
  kFailed,
  kTold  // failed for a reason beyond the communicator
};

// One cache line that announces a call: its number, its signature, the location of the arrays, and
// a payload of up to 16 bytes. All other fields are written before `sequence` and read after it.
struct alignas(kCacheLine) Header {
  Counter sequence;
  Counter signature;
  Counter count;
  Counter list;
  Counter input;   // location of the input; 0 if not accessible, or if it is the payload
  Counter output;  // location of the output; 0 if not accessible
  std::array<std::byte, 16> payload;
};
static_assert(sizeof(Header) == kCacheLine);

// Returns the signature in a Header or a BlockedWait.
[[nodiscard]] Signature signature_in(const auto& call) noexcept {
  return unpack_signature(call.signature.load(std::memory_order_relaxed),
                          call.count.load(std::memory_order_relaxed),
                          call.list.load(std::memory_order_relaxed));
}

// The location of a call that does not match other ranks' calls: "file.py:12 in train".
struct alignas(kCacheLine) CallSite {
  Counter call;  // the number of the call that `text` describes
  std::array<char, 512 - sizeof(Counter)> text;

  void write(const std::string& location) noexcept {
    text[location.copy(text.data(), text.size() - 1)] = '\0';
  }
};

// What a rank does not do before its wait ends: a call in this communicator, or any call, while it
// waits here or in another communicator.
enum class Reach : std::uint64_t { kHere, kEverywhere, kElsewhere };

// The wait of a rank that makes no other call until it ends. Published by long waits. `number` is
// stored last, differs from wait to wait of a process, and is 0 while there is no such wait.
struct alignas(kCacheLine) BlockedWait {
  Counter number;
  Counter signature;  // of the call
  Counter count;
  Counter list;
  Counter rank;    // that must act
  Counter offset;  // of the counter in that rank's segment
  Counter value;   // that the counter must reach
  std::atomic<Reach> reach;
};
static_assert(sizeof(BlockedWait) == kCacheLine);

struct Control {
  Bell bell;                              // of the thread that runs collectives
  alignas(kCacheLine) Counter exposed;    // rounds whose input is in the staging area
  alignas(kCacheLine) Counter consumed;   // rounds for which the peers' input has been read
  alignas(kCacheLine) Counter gathered;   // rounds for which the peers' results have been read
  alignas(kCacheLine) Counter accessing;  // the call that uses peers' arrays in place now, or 0
  alignas(kCacheLine) std::atomic<RankState> state;
  std::atomic<std::uint32_t> closed;  // number of ranks that no longer use this block
  FailureRecord failure;              // written before `state`
  CallSite site;
  BlockedWait blocked;
  CallSite blocked_site;  // of that wait; ranks may still read `site` of an earlier call
  Counter failing;        // the number of a wait that ends with a failure announced to it
  cpu_set_t cores;        // that this rank may run on; written before `has_cores`
  std::atomic<bool> has_cores;
  Counter window;  // bytes of each segment that this rank has mapped
};

// One rank's half of a lane. The sender's half announces data and counts filled chunks; the
// receiver's half announces the receive and counts emptied chunks.
struct LaneHalf {
  Bell bell;                      // of the thread that runs this rank's half
  std::array<Header, 2> headers;  // of even and odd transfers
  CallSite site;
  alignas(kCacheLine) Counter chunks;
  Counter accessing;  // the transfer whose sender's array is being read in place now, or 0
};

// A rank's lanes to and from one other rank.
struct Lane {
  LaneHalf to;    // this rank sends
  LaneHalf from;  // this rank receives
};

// Bytes that loops process at a time: fits the first-level cache.
inline constexpr std::size_t kBlock = std::size_t{16} << 10;

// Returns the bytes per round of an array. A short one takes a single round; others take several,
// whose steps overlap.
[[nodiscard]] constexpr std::size_t chunk_for(std::size_t bytes, std::size_t least,
                                              std::size_t most) noexcept {
  constexpr std::size_t kRounds = 4;
  const std::size_t alone = most / 8;
  const std::size_t wanted = bytes <= alone ? bytes : std::max(bytes / kRounds, alone);
  return std::clamp(round_up(wanted, kCacheLine), least, most);
}

// Sizes and offsets of the parts of a block.
//
// Rounds take their turns through the whole rings, call after call: a line that a peer has read a
// moment ago is slow to write, since it must first be taken from the peer's caches. After a turn it
// is in neither rank's own caches.
struct Layout {
  int ranks;
  std::size_t slot_bytes;   // payload of a slot
  std::size_t chunk_bytes;  // most bytes of input per round
  std::size_t ring_bytes;   // a multiple of chunk_bytes
  std::size_t lane_ring_bytes;

  [[nodiscard]] std::size_t slot(int parity) const noexcept {
    return align(sizeof(Control) + static_cast<std::size_t>(ranks) * sizeof(Lane)) +
           static_cast<std::size_t>(parity) * align(sizeof(Header) + slot_bytes);
  }
  [[nodiscard]] std::size_t inputs() const noexcept { return align(slot(2)); }
  [[nodiscard]] std::size_t results() const noexcept { return inputs() + align(ring_bytes); }
  [[nodiscard]] std::size_t lane_ring(int peer) const noexcept {
    const std::size_t most_parts = ring_bytes / least_chunk();
    const std::size_t slices = ring_bytes / static_cast<std::size_t>(ranks);
    return results() + align(slices + most_parts * kCacheLine) +
           static_cast<std::size_t>(peer) * align(lane_ring_bytes);
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return lane_ring(ranks); }

  // Rounds may be as small as this, which has room for a line of each rank.
  [[nodiscard]] std::size_t least_chunk() const noexcept {
    return std::max(round_up(chunk_bytes / 32, kCacheLine),
                    static_cast<std::size_t>(ranks) * kCacheLine);
  }
  // A rank's slice of a chunk, rounded up to whole lines.
  [[nodiscard]] std::size_t result_bytes(std::size_t chunk) const noexcept {
    const auto n = static_cast<std::size_t>(ranks);
    return round_up((chunk + n - 1) / n, kCacheLine);
  }

 private:
  [[nodiscard]] static std::size_t align(std::size_t bytes) noexcept {
    return round_up(bytes, 4096);
  }
};

// The parts of the rings that the rounds of a call use.
class Turn {
 public:
  // Begins behind `position` in a ring of `ring_bytes`.
  Turn(std::size_t position, std::size_t chunk, std::size_t ring_bytes) noexcept
      : chunk_(chunk), parts_(ring_bytes / chunk), first_((position + chunk - 1) / chunk) {}

  [[nodiscard]] std::size_t part(std::size_t round) const noexcept {
    return (first_ + round) % parts_;
  }
  [[nodiscard]] std::size_t chunk() const noexcept { return chunk_; }
  // Returns the position behind `rounds` rounds.
  [[nodiscard]] std::size_t end(std::size_t rounds) const noexcept { return part(rounds) * chunk_; }

 private:
  std::size_t chunk_;
  std::size_t parts_;
  std::size_t first_;
};

}  // namespace fastdist::host
