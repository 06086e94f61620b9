// Measures the links between machines, and explains which way a call takes.

#include <algorithm>
#include <array>
#include <vector>

#include "net/communicator.h"
#include "net/inside.h"

namespace fastdist::net {
namespace {

constexpr int kRounds = 9;
constexpr std::size_t kBulkBytes = std::size_t{128} << 10;
constexpr double kMostSeconds = 600;
constexpr int kBulks = 3;  // the first ones open TCP's window

std::string text_of(double value, const char* unit) {
  std::string text = std::to_string(value);
  text.resize(text.find('.') + 2);
  return text + unit;
}

}  // namespace

bool NetCommunicator::travels_with_records(Op op, std::size_t bytes) {
  const bool may_travel = op == Op::kAllReduce || op == Op::kReduce || op == Op::kBroadcast ||
                          op == Op::kAllGather || op == Op::kGather || op == Op::kBarrier;
  return may_travel && bytes <= kPayload;
}

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

Route NetCommunicator::route(Op op, std::size_t argument_bytes) const {
  const auto bytes = static_cast<double>(argument_bytes);
  const double m = machines();
  const double n = size();
  const double local = n / m;
  if (travels_with_records(op, argument_bytes)) {
    return {.way = "with the comparison of calls",
            .why = "up to " + std::to_string(kPayload) + " bytes",
            .moves_arrays = false,
            .crossings = 1,
            .link_bytes = static_cast<double>(sizeof(Record)) * local * (m - 1)};
  }
  Route route{.way = "straight to their ranks", .why = "", .crossings = 2};
  const std::string links = text_of(links_.latency_s * 1e6, " us and ") +
                            text_of(links_.bytes_per_s / 1e6, " MB/s between machines");
  switch (op) {
    case Op::kAllReduce:
    case Op::kReduce: {
      const bool direct = links_.reduces_directly(machines(), bytes);
      route.way = direct ? "sums straight to all machines, in chunks"
                         : "a part of the sums to each machine and back, in chunks";
      route.why = links;
      route.crossings = direct ? 2 : 3;
      route.link_bytes = bytes * (direct ? m - 1 : 2 * (m - 1) / m);
      break;
    }
    case Op::kBroadcast: {
      const bool chain = links_.broadcasts_in_chain(machines(), bytes);
      route.way = chain ? "from machine to machine, in chunks" : "from the root to all machines";
      route.why = links;
      route.crossings = chain ? machines() : 2;
      route.link_bytes = bytes * (chain ? 1 : m - 1);
      break;
    }
    case Op::kAllGather:
      route.link_bytes = bytes * local * (m - 1);
      break;
    case Op::kGather:
    case Op::kScatter:
      route.link_bytes = bytes * (n - local);
      break;
    case Op::kReduceScatter:
      route.link_bytes = bytes * (m - 1) / m;
      break;
    case Op::kAllToAll:
      route.link_bytes = bytes * local * (m - 1) / m;
      break;
    case Op::kSend:
    case Op::kRecv:
      route.link_bytes = bytes;
      break;
    case Op::kBarrier:
    case Op::kEmpty:
    case Op::kGroup:
      break;
  }
  return route;
}

}  // namespace fastdist::net
