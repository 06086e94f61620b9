// What one rank of a communicator keeps in shared memory. Zero bytes are the initial state.
//
//   Control | Lane × ranks | 2 slots | staging: 2 inputs, 2 results | 2 lane buffers × ranks
//
// Words written by the owner and read by all are counters that only grow. A collective is known by
// its sequence number; within it, progress is counted in rounds, and `progress(sequence, round)`
// orders both, so that a counter never has to be set back.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "host/signal.h"

namespace fastdist::host {

using Counter = std::atomic<std::uint64_t>;

inline constexpr std::uint64_t kRoundBits = 24;
inline constexpr std::uint64_t kAllRounds = (std::uint64_t{1} << kRoundBits) - 1;

[[nodiscard]] constexpr std::uint64_t progress(std::uint64_t sequence,
                                               std::uint64_t round) noexcept {
  return sequence << kRoundBits | round;
}

// Why a rank left a communicator; kActive while it has not.
enum class Departure : std::uint32_t { kActive, kClosed, kTimeout, kPeerFailure, kInterrupted };

// One line that announces a call: its number, its signature, where the arrays lie; a payload of up
// to 16 bytes rides along. All fields but `sequence` are written before it and read after it.
struct alignas(kCacheLine) Header {
  Counter sequence;
  Counter signature;
  Counter count;
  Counter list;
  Counter input;   // location of the input, 0: not reachable, or it is the payload
  Counter output;  // location of the output, 0: not reachable
  std::array<std::byte, 16> payload;
};
static_assert(sizeof(Header) == kCacheLine);

// Where a rank made a call that others contradict: "file.py:12 in train".
struct alignas(kCacheLine) CallSite {
  Counter call;  // the number of the call that `text` is about
  std::array<char, 512 - sizeof(Counter)> text;

  void write(const std::string& location) noexcept {
    const std::size_t length = std::min(location.size(), text.size() - 1);
    std::copy_n(location.data(), length, text.data());
    text[length] = '\0';
  }
};

struct Control {
  Bell bell;                             // of the thread that runs collectives
  alignas(kCacheLine) Counter exposed;   // rounds whose input lies in the staging area
  alignas(kCacheLine) Counter consumed;  // rounds whose peers' input has been read
  alignas(kCacheLine) Counter gathered;  // rounds whose peers' results have been read
  alignas(kCacheLine) Counter touching;  // the call whose peers' arrays are used in place now, or 0
  alignas(kCacheLine) std::atomic<std::uint32_t> departure;
  std::atomic<std::uint32_t> blamed;  // the rank that a departure is about
  std::atomic<std::uint32_t> closed;  // how many ranks are done with this block
  CallSite site;
  std::array<Counter, 16> cores;  // a bit for each of the first 1024 that this rank may run on
  Counter window;                 // bytes of each segment that this rank has mapped
};

// Half of a channel between two ranks. The sender's half announces data and counts chunks filled;
// the receiver's half announces the receive and counts chunks emptied.
struct LaneHalf {
  Bell bell;                      // of the thread that runs this rank's side
  std::array<Header, 2> headers;  // of odd and even transfers
  CallSite site;
  alignas(kCacheLine) Counter chunks;
  Counter touching;  // the transfer whose sender's array is being read in place now, or 0
};

// What a rank keeps for one other rank.
struct Lane {
  LaneHalf to;    // this rank sends
  LaneHalf from;  // this rank receives
};

// What loops work on at a time: fits the first-level cache.
inline constexpr std::size_t kBlock = std::size_t{16} << 10;

// Sizes of the parts and where they lie.
struct Layout {
  int ranks;
  std::size_t slot_bytes;   // payload of a slot
  std::size_t chunk_bytes;  // of input per round
  std::size_t lane_bytes;   // of a chunk of send and recv

  [[nodiscard]] std::size_t slot(int parity) const noexcept {
    return align(sizeof(Control) + static_cast<std::size_t>(ranks) * sizeof(Lane)) +
           static_cast<std::size_t>(parity) * align(sizeof(Header) + slot_bytes);
  }
  [[nodiscard]] std::size_t input(int parity) const noexcept {
    return align(slot(2)) + static_cast<std::size_t>(parity) * chunk_bytes;
  }
  [[nodiscard]] std::size_t result(int parity) const noexcept {
    return input(2) + static_cast<std::size_t>(parity) * result_bytes();
  }
  [[nodiscard]] std::size_t lane_buffer(int peer, int parity) const noexcept {
    return result(2) + static_cast<std::size_t>(2 * peer + parity) * lane_bytes;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return lane_buffer(ranks, 0); }

  // One slice of a chunk, rounded up to whole lines; also the scratch of `reduce_in_place`.
  [[nodiscard]] std::size_t result_bytes() const noexcept {
    const std::size_t slice = chunk_bytes / static_cast<std::size_t>(ranks) + kCacheLine;
    return align(std::max(kBlock, slice));
  }

 private:
  [[nodiscard]] static std::size_t align(std::size_t bytes) noexcept {
    return (bytes + 4095) / 4096 * 4096;
  }
};

}  // namespace fastdist::host
