// Memory that the ranks of a communicator share, be they threads or processes: where they meet,
// where their hosts exchange numbers, and the channels that the data goes through.
//
// It is a memfd, named in the unique id by its place in /proc: nothing is left behind. All waiting
// polls, so that a rank that is killed or never comes leaves no lock behind.
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

// Bytes from one rank to another: a ring.
struct Channel {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  std::array<char, kChannelBytes> data;
};

// What a rank tells all others in one exchange of the hosts.
struct Board {
  std::atomic<std::uint64_t> turn;  // the number is of this exchange
  std::uint64_t number;
};

struct RankFacts {
  std::uint64_t host;
  std::array<char, 16> device;  // its uuid
  bool may_share;
};

struct Slot {
  std::atomic<int> is_taken;
  std::atomic<int> has_joined;  // `facts` are there
  RankFacts facts;
  std::array<Board, 2> boards;  // of even and odd turns
};

// Zeros when fresh.
struct Shared {
  std::atomic<std::uint64_t> tag;  // that of the unique id
  std::atomic<int> size;
  std::atomic<int> has_failed;
  std::array<Slot, kMostRanks> slots;
  // Of collectives, and of sends and receives: [from][to]
  std::array<std::array<std::array<Channel, kMostRanks>, kMostRanks>, 2> channels;
};

class Segment {
 public:
  // What `open` takes, at most 127 characters; this process keeps the memory until `forget`.
  [[nodiscard]] static std::string create();
  // Null where it cannot be opened.
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

// Polls until `is_true`; false when `is_given_up` comes first.
bool wait_until(const std::function<bool()>& is_true, const std::function<bool()>& is_given_up);

}  // namespace virtual_nccl
