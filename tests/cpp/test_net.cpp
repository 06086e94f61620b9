// Ranks on several machines, as threads that share memory within their machine alone.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "host/kernels.h"
#include "net/communicator.h"
#include "world.h"

namespace fastdist::test {
namespace {

using net::Connections;
using net::NetCommunicator;
using net::Place;
using Machines = std::vector<std::vector<int>>;
using NetRanks = std::vector<std::unique_ptr<NetCommunicator>>;

const std::vector<Machines> kWorldsOfMachines = {
    {{0}, {1}}, {{0}, {1}, {2}}, {{0, 2}, {1}}, {{0, 3}, {1, 2}}, {{0, 1}, {2, 3}, {4, 5}}};

// Around the limits of payloads, chunks and steps, and not divisible by the ranks.
constexpr std::size_t kNetCounts[] = {0, 1, 17, 58, 59, 1003, 9001, 70001};

// Returns both ends of a TCP connection.
std::pair<FileDescriptor, FileDescriptor> make_connection() {
  const FileDescriptor listener(::socket(AF_INET, SOCK_STREAM, 0));
  FileDescriptor first(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const address = reinterpret_cast<sockaddr*>(&place);
  socklen_t length = sizeof(place);
  CHECK(::bind(listener.get(), address, length) == 0);
  CHECK(::listen(listener.get(), 1) == 0);
  CHECK(::getsockname(listener.get(), address, &length) == 0);
  CHECK(::connect(first.get(), address, length) == 0);
  FileDescriptor second(::accept(listener.get(), nullptr, nullptr));
  CHECK(second.get() >= 0);
  return {std::move(first), std::move(second)};
}

NetRanks connect(const Machines& machines) {
  std::vector<Place> places;
  std::vector<std::shared_ptr<HostCommunicator>> inner;
  for (std::size_t m = 0; m < machines.size(); ++m) {
    Ranks here = make_thread_ranks(static_cast<int>(machines[m].size()), Tuning{});
    for (std::size_t i = 0; i < here.size(); ++i) {
      const auto rank = static_cast<std::size_t>(machines[m][i]);
      if (rank >= places.size()) {
        places.resize(rank + 1);
        inner.resize(rank + 1);
      }
      places[rank] = {static_cast<int>(m), "127.0.0.1"};
      inner[rank] = std::move(here[i]);
    }
  }
  const std::size_t n = places.size();
  std::vector<std::vector<Connections>> connections(n);
  for (auto& each : connections) each.resize(n);
  for (std::size_t p = 0; p < n; ++p) {
    for (std::size_t q = 0; q < p; ++q) {
      std::tie(connections[p][q].out, connections[q][p].in) = make_connection();
      std::tie(connections[p][q].in, connections[q][p].out) = make_connection();
      if (places[p].machine == places[q].machine) continue;
      std::tie(connections[p][q].stream, connections[q][p].stream) = make_connection();
    }
  }
  NetRanks ranks;
  for (std::size_t p = 0; p < n; ++p) {
    ranks.push_back(std::make_unique<NetCommunicator>(inner[p], static_cast<int>(p), places,
                                                      std::move(connections[p])));
  }
  return ranks;
}

template <class Call>
ErrorCode code_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  throw Failure("no error");
}

template <class Body>
void with_machines(const Machines& machines, Body&& body) {
  NetRanks ranks = connect(machines);
  const auto of = [&](int r) -> NetCommunicator& { return *ranks[static_cast<std::size_t>(r)]; };
  in_threads(
      static_cast<int>(ranks.size()), [&](int r) { body(of(r)); }, [&](int r) { of(r).close(); });
}

using Values = std::vector<std::int64_t>;

TensorView view(Values& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size(), DType::kInt64, 0};
}

// Element i of rank r's array.
std::int64_t value(int r, std::size_t i) { return static_cast<std::int64_t>(i % 97) * 8 + r; }

Values values_of(int r, std::size_t count) {
  Values values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = value(r, i);
  return values;
}

Values sums(int n, std::size_t count) {
  Values result(count);
  for (int r = 0; r < n; ++r) {
    for (std::size_t i = 0; i < count; ++i) result[i] += value(r, i);
  }
  return result;
}

void check_reductions(NetCommunicator& c, std::size_t count) {
  const int n = c.size();
  Values x = values_of(c.rank(), count);
  TensorView v = view(x);
  c.all_reduce({&v, 1}, {&v, 1}, ReduceOp::kSum, patient());
  CHECK(x == sums(n, count));

  Values in = values_of(c.rank(), count);
  Values out(count, -1);
  const TensorView from = view(in);
  const TensorView to = view(out);
  const int root = n - 1;
  const bool is_root = c.rank() == root;
  c.reduce({&from, 1}, is_root ? TensorViews{&to, 1} : TensorViews{}, ReduceOp::kSum, root,
           patient());
  CHECK(in == values_of(c.rank(), count));
  CHECK(out == (is_root ? sums(n, count) : Values(count, -1)));

  Values wide = values_of(c.rank(), count * static_cast<std::size_t>(n));
  Values part(count, -1);
  c.reduce_scatter(view(wide), view(part), ReduceOp::kSum, patient());
  const Values all = sums(n, wide.size());
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(count) * c.rank();
  CHECK(part == Values(first, first + static_cast<std::ptrdiff_t>(count)));
}

void check_movement(NetCommunicator& c, std::size_t count) {
  const auto n = static_cast<std::size_t>(c.size());
  Values own = values_of(c.rank(), count);
  Values everyone;
  for (int r = 0; r < c.size(); ++r) {
    const Values theirs = values_of(r, count);
    everyone.insert(everyone.end(), theirs.begin(), theirs.end());
  }
  Values joined(n * count, -1);
  c.all_gather(view(own), view(joined), patient());
  CHECK(joined == everyone);

  const int root = 1;
  Values gathered(c.rank() == root ? n * count : 0, -1);
  c.gather(view(own), view(gathered), root, patient());
  CHECK(gathered == (c.rank() == root ? everyone : Values{}));

  Values whole = c.rank() == root ? everyone : Values{};
  Values part(count, -1);
  c.scatter(view(whole), view(part), root, patient());
  CHECK(part == own);

  Values x = values_of(c.rank(), count);
  const TensorView v = view(x);
  c.broadcast({&v, 1}, root, patient());
  CHECK(x == values_of(root, count));

  Values give(n * count);
  Values take(n * count, -1);
  for (std::size_t q = 0; q < n; ++q) {
    for (std::size_t i = 0; i < count; ++i) {
      give[q * count + i] = value(c.rank(), i) * 10 + static_cast<std::int64_t>(q);
    }
  }
  c.all_to_all(view(give), view(take), {}, patient());
  for (std::size_t q = 0; q < n; ++q) {
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(take[q * count + i] == value(static_cast<int>(q), i) * 10 + c.rank());
    }
  }
}

CASE(every_collective_on_every_layout) {
  for (const Machines& machines : kWorldsOfMachines) {
    with_machines(machines, [](NetCommunicator& c) {
      for (const std::size_t count : kNetCounts) {
        check_reductions(c, count);
        check_movement(c, count);
        c.barrier(patient());
      }
    });
  }
}

// The sum of float32 values by the tree over ranks [begin, end).
float tree_sum(const std::vector<std::vector<float>>& of_ranks, std::size_t i, std::size_t begin,
               std::size_t end) {
  if (end - begin == 1) return of_ranks[begin][i];
  std::size_t left = 1;
  while (2 * left < end - begin) left *= 2;
  return tree_sum(of_ranks, i, begin, begin + left) + tree_sum(of_ranks, i, begin + left, end);
}

// Random numbers, as float32 and as the float32 or bfloat16 array that a rank gives.
void check_bits(NetCommunicator& c, std::size_t count, bool is_narrow) {
  const auto n = static_cast<std::size_t>(c.size());
  const auto r = static_cast<std::size_t>(c.rank());
  const DType dtype = is_narrow ? DType::kBFloat16 : DType::kFloat32;
  const std::size_t bytes = count * n * size_of(dtype);
  std::vector<std::vector<float>> values(n, std::vector<float>(count * n));
  std::vector<std::byte> own(bytes);
  for (std::size_t p = 0; p < n; ++p) {
    for (std::size_t i = 0; i < values[p].size(); ++i) {
      values[p][i] = static_cast<float>(static_cast<double>(mix(p, 7, i)) * 0x1p-40) - 3e6F;
    }
    std::vector<std::byte> narrow(bytes);
    host::convert(dtype, narrow.data(), DType::kFloat32,
                  reinterpret_cast<const std::byte*>(values[p].data()), count * n, 1.0F);
    host::convert(DType::kFloat32, reinterpret_cast<std::byte*>(values[p].data()), dtype,
                  narrow.data(), count * n, 1.0F);
    if (p == r) own = narrow;
  }
  const auto expected = [&](std::size_t begin, std::size_t length, bool is_mean) {
    std::vector<float> sums(length);
    for (std::size_t i = 0; i < length; ++i) {
      sums[i] = tree_sum(values, begin + i, 0, n) / (is_mean ? static_cast<float>(n) : 1.0F);
    }
    std::vector<std::byte> result(length * size_of(dtype));
    host::convert(dtype, result.data(), DType::kFloat32,
                  reinterpret_cast<const std::byte*>(sums.data()), length, 1.0F);
    return result;
  };
  const auto of = [&](std::vector<std::byte>& data) {
    return TensorView{data.data(), data.size() / size_of(dtype), dtype, 0};
  };
  std::vector<std::byte> part(count * size_of(dtype));
  c.reduce_scatter(of(own), of(part), ReduceOp::kMean, patient());
  CHECK(part == expected(r * count, count, true));
  std::vector<std::byte> at_root(bytes);
  const TensorView in = of(own), out = of(at_root);
  c.reduce({&in, 1}, r == 1 ? TensorViews{&out, 1} : TensorViews{}, ReduceOp::kSum, 1, patient());
  CHECK(r != 1 || at_root == expected(0, count * n, false));
  c.all_reduce({&in, 1}, {&in, 1}, ReduceOp::kMean, patient());
  CHECK(own == expected(0, count * n, true));
}

CASE(the_same_bits_wherever_ranks_run) {
  const std::vector<Machines> layouts = {{{0, 1, 2, 3}, {4, 5, 6, 7}},
                                         {{0, 1}, {2, 3}, {4, 5}, {6, 7}},
                                         {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}},
                                         {{0, 1, 2}, {3, 4, 5}, {6, 7}},
                                         {{0, 2, 4, 6}, {1, 3, 5, 7}},
                                         {{0, 5}, {1, 2, 3, 4}},
                                         {{0, 1, 2}, {3, 4, 5}},
                                         {{0}, {1, 2, 3, 4, 5, 6}}};
  for (const Machines& layout : layouts) {
    with_machines(layout, [](NetCommunicator& c) {
      for (const std::size_t count : {1, 40, 1003, 30'001}) {
        check_bits(c, count, false);
        check_bits(c, count, true);
      }
    });
  }
}

CASE(lists_and_results_elsewhere) {
  with_machines({{0, 3}, {1, 2}}, [](NetCommunicator& c) {
    Values a = values_of(c.rank(), 300), b = values_of(c.rank(), 20'000),
           d = values_of(c.rank(), 7);
    Values out_a(300), out_b(20'000), out_d(7);
    const std::vector<TensorView> in{view(a), view(b), view(d)};
    const std::vector<TensorView> out{view(out_a), view(out_b), view(out_d)};
    c.all_reduce(in, out, ReduceOp::kSum, patient());
    CHECK(out_a == sums(4, 300) && out_b == sums(4, 20'000) && out_d == sums(4, 7));
    CHECK(b == values_of(c.rank(), 20'000));
    c.broadcast(in, 2, patient());
    CHECK(a == values_of(2, 300) && b == values_of(2, 20'000) && d == values_of(2, 7));
  });
}

CASE(transfers_between_all_ranks) {
  with_machines({{0, 1}, {2}}, [](NetCommunicator& c) {
    const int n = c.size();
    for (const std::size_t count : {std::size_t{0}, std::size_t{5}, std::size_t{200'000}}) {
      std::vector<std::thread> threads;  // both directions of every lane at once
      std::atomic<int> wrong{0};
      for (int q = 0; q < n; ++q) {
        if (q == c.rank()) continue;
        threads.emplace_back([&, q] {
          Values own = values_of(c.rank(), count);
          c.send(view(own), q, patient());
        });
        threads.emplace_back([&, q] {
          Values got(count, -1);
          c.recv(view(got), q, patient());
          wrong += got != values_of(q, count);
        });
      }
      c.barrier(patient());  // beside them
      for (std::thread& t : threads) t.join();
      CHECK(wrong == 0);
    }
  });
}

CASE(mismatches_leave_the_communicator_usable) {
  with_machines({{0, 1}, {2}}, [](NetCommunicator& c) {
    for (int round = 0; round < 3; ++round) {
      const TestCaller caller("train.py:" + std::to_string(c.rank()));
      Values x = values_of(c.rank(), c.rank() == 1 ? 4 : 70'000);
      const TensorView v = view(x);
      try {
        c.all_reduce({&v, 1}, {&v, 1}, ReduceOp::kSum, {std::chrono::seconds(20), &caller});
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kMismatch);
        const std::string text = error.what();
        CHECK(text.find("rank 1: all_reduce(int64 × 4, op=\"sum\") at train.py:1") !=
              std::string::npos);
        CHECK(text.find("rank 2: all_reduce(int64 × 70000, op=\"sum\") at train.py:2") !=
              std::string::npos);
      }
      CHECK(x == values_of(c.rank(), x.size()));
      check_reductions(c, 100);
      if (c.rank() == 1) continue;
      Values y(c.rank() == 0 ? 30'000 : 5);
      try {
        const CallOptions options{std::chrono::seconds(20), &caller};
        c.rank() == 0 ? c.send(view(y), 2, options) : c.recv(view(y), 0, options);
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kMismatch);
        CHECK(std::string(error.what()).find("rank 2: recv(int64 × 5, src=0) at train.py:2") !=
              std::string::npos);
      }
    }
  });
}

// Returns the code of the error that `call` throws.
CASE(a_rank_that_leaves_ends_the_calls_of_all) {
  for (const int gone : {0, 1, 2, 3}) {
    with_machines({{0, 1}, {2, 3}}, [gone](NetCommunicator& c) {
      Values x = values_of(c.rank(), 1000);
      const TensorView v = view(x);
      const auto call = [&] { c.all_reduce({&v, 1}, {&v, 1}, ReduceOp::kSum, patient()); };
      call();
      if (c.rank() == gone) return c.close();
      CHECK(code_of(call) == ErrorCode::kPeerFailure);
      CHECK(code_of(call) == ErrorCode::kPeerFailure);
    });
  }
}

CASE(an_interrupted_rank_ends_the_calls_of_all) {
  for (const int interrupted : {0, 1, 2}) {
    std::promise<void> given_up;
    const std::shared_future<void> has_given_up = given_up.get_future().share();
    with_machines({{0, 1}, {2}}, [&](NetCommunicator& c) {
      if (c.rank() == interrupted) {
        TestCaller caller;
        caller.interrupted = true;
        bool raised = false;
        try {
          c.barrier({std::chrono::seconds(20), &caller});
        } catch (const Failure&) {
          raised = true;
        }
        given_up.set_value();
        CHECK(raised);
        CHECK(code_of([&] { c.barrier(patient()); }) == ErrorCode::kState);
        return;
      }
      // One rank comes when the interrupted rank, which waits for it, has given up.
      if (c.rank() == (interrupted + 1) % 3) {
        CHECK(has_given_up.wait_for(std::chrono::seconds(30)) == std::future_status::ready);
      }
      const Error error = CHECK_THROWS(ErrorCode::kPeerFailure, {
        c.barrier(patient());  // may end, since the interrupted rank has arrived
        c.barrier(patient());
      });
      const std::string reason = ": rank " + std::to_string(interrupted) + " was interrupted;";
      CHECK_THAT(std::string(error.what()).find(reason) != std::string::npos, error.what());
    });
  }
}

CASE(a_late_rank_is_named) {
  for (const int late : {0, 1, 2}) {
    with_machines({{0, 1}, {2}}, [late](NetCommunicator& c) {
      if (c.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      try {
        c.barrier(impatient(std::chrono::milliseconds(200)));
        CHECK(c.rank() == late);
        c.barrier(patient());  // the late rank learns it here at the latest
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::kTimeout);
        if (c.rank() != late) CHECK(error.ranks() == std::vector<int>{late});
      }
    });
  }
}

CASE(calls_of_two_threads_are_no_deadlock) {
  with_machines({{0, 1}, {2, 3}}, [](NetCommunicator& c) {
    Values x(3);
    const TensorView v = view(x);
    if (c.rank() >= 2) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    std::thread other;
    if (c.rank() == 0) other = std::thread([&] { c.send(v, 1, patient()); });
    c.barrier(patient());
    if (c.rank() == 1) c.recv(v, 0, patient());
    if (other.joinable()) other.join();
  });
}

}  // namespace
}  // namespace fastdist::test
