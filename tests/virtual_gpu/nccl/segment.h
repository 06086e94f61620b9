// Memory shared by the ranks of a communicator, which may be threads or processes: ranks join in
// it, hosts exchange numbers, and data goes through its channels.
//
// The memory is a memfd that the unique id names by its path in /proc, so nothing is left behind.
// All waits poll, so a rank that is killed or never arrives leaves no lock behind.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace virtual_nccl {

inline constexpr int kMostRanks = 16;
inline constexpr std::size_t kChannelBytes = std::size_t{64} << 10;

// A ring buffer of bytes from one rank to another.
struct Channel {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  std::array<char, kChannelBytes> data;
};

// A rank's number in one exchange between hosts.
struct Board {
  std::atomic<std::uint64_t> turn;  // the exchange that the number belongs to
  std::uint64_t number;
};

struct RankFacts {
  std::uint64_t host;
  std::array<char, 16> device;  // the device's uuid
  bool may_share;
};

struct Slot {
  std::atomic<int> is_taken;
  std::atomic<int> has_joined;  // `facts` is set
  RankFacts facts;
  std::array<Board, 2> boards;  // for even and odd turns
};

// Initially zeros.
struct Shared {
  std::atomic<std::uint64_t> tag;  // of the unique id
  std::atomic<int> size;
  std::atomic<int> has_failed;
  std::array<Slot, kMostRanks> slots;
  // For collectives and for sends and receives: [kind][from][to]
  std::array<std::array<std::array<Channel, kMostRanks>, kMostRanks>, 2> channels;
  // [rank][peer]: whether the rank has called a send or receive with the peer.
  std::array<std::array<std::atomic<bool>, kMostRanks>, kMostRanks> has_called;
};

class Segment {
 public:
  // Returns a name for `open`, of at most 127 characters. This process keeps the memory until
  // `forget`.
  [[nodiscard]] static std::string create();
  // Returns null if the segment cannot be opened.
  [[nodiscard]] static std::shared_ptr<Segment> open(const std::string& name);
  static void forget(const std::string& name);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  [[nodiscard]] Shared& shared() const noexcept { return *shared_; }

 private:
  explicit Segment(Shared* shared) : shared_(shared) {}
  Shared* shared_;
};

// Polls until `is_true`; returns false if `is_given_up` is true first.
bool wait_until(const std::function<bool()>& is_true, const std::function<bool()>& is_given_up);

}  // namespace virtual_nccl
