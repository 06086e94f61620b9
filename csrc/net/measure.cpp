// Measures the links between machines, by which calls choose their way.

#include <algorithm>
#include <array>
#include <vector>

#include "net/communicator.h"

namespace fastdist::net {
namespace {

constexpr int kRounds = 9;
constexpr std::size_t kBulkBytes = std::size_t{128} << 10;
constexpr double kMostSeconds = 600;
constexpr int kBulks = 3;  // the first ones open TCP's window

}  // namespace

// The first ranks of the machines form a ring: each sends to the next rank while it receives from
// the previous one, so that links are used in both directions.
void NetCommunicator::measure_links(const CallOptions& options) {
  run(Signature{.op = Op::kBarrier}, options, {}, nullptr, [&] {
    std::array<double, 2> own{0, 0};  // seconds for one byte, and for `kBulkBytes`
    if (local_of(rank_) == 0) {
      const int next = ranks_of((machine_of(rank_) + 1) % machines())[0];
      const int before = ranks_of((machine_of(rank_) + machines() - 1) % machines())[0];
      std::vector<std::byte> out(kBulkBytes), in(kBulkBytes);
      const auto pass = [&](std::size_t bytes) {
        const auto start = Clock::now();
        post_send(next, out.data(), bytes);
        post_receive(before, in.data(), bytes);
        await_received(before);
        await_sent(next);
        return std::chrono::duration<double>(Clock::now() - start).count();
      };
      std::vector<double> times;
      for (int i = 0; i < kRounds; ++i) times.push_back(pass(1));
      std::sort(times.begin(), times.end());
      own[0] = times[kRounds / 2];
      for (int i = 0; i < kBulks; ++i) own[1] = pass(kBulkBytes);
    }
    std::vector<std::array<double, 2>> everyone(places_.size());
    share(reinterpret_cast<const std::byte*>(&own), sizeof(own),
          reinterpret_cast<std::byte*>(everyone.data()));
    std::array<double, 2> slowest{1e-6, 2e-6};
    for (const auto& times : everyone) {
      for (std::size_t i = 0; i < slowest.size(); ++i) {  // NaN changes nothing
        slowest[i] = std::max(slowest[i], std::min(times[i], kMostSeconds));
      }
    }
    links_.latency_s = slowest[0];
    links_.bytes_per_s = kBulkBytes / std::max(slowest[1] - slowest[0], 1e-6);
  });
  sequence_ = 0;  // users count their own calls
  std::fill(last_.begin(), last_.end(), CallHead{});
}

}  // namespace fastdist::net
