// Ranks on several machines, as threads that share memory within their machine alone.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "net/communicator.h"
#include "net/connect.h"
#include "net/fork_guard.h"
#include "net/hello.h"
#include "net/hmac.h"
#include "world.h"

namespace fastdist::test {
namespace {

using net::Connections;
using net::Listener;
using net::NetCommunicator;
using net::Place;
using net::Purpose;
using Machines = std::vector<std::vector<int>>;
using NetRanks = std::vector<std::unique_ptr<NetCommunicator>>;

const std::vector<Machines> kWorldsOfMachines = {
    {{0}, {1}}, {{0}, {1}, {2}}, {{0, 2}, {1}}, {{0, 3}, {1, 2}}, {{0, 1}, {2, 3}, {4, 5}}};

// Around the limits of payloads, chunks and steps, and not divisible by the ranks.
constexpr std::size_t kNetCounts[] = {0, 1, 17, 58, 59, 1003, 9001, 70001};

int size_of_world(const Machines& machines) {
  int n = 0;
  for (const auto& ranks : machines) n += static_cast<int>(ranks.size());
  return n;
}

struct World {
  std::vector<Place> places;
  std::vector<std::unique_ptr<Listener>> listeners;
  std::vector<std::shared_ptr<HostCommunicator>> inner;
};

World make_world(const Machines& machines) {
  const auto n = static_cast<std::size_t>(size_of_world(machines));
  World world;
  world.places.resize(n);
  world.inner.resize(n);
  for (std::size_t r = 0; r < n; ++r) {
    world.listeners.push_back(std::make_unique<Listener>("127.0.0.1"));
  }
  for (std::size_t m = 0; m < machines.size(); ++m) {
    Ranks inner = make_thread_ranks(static_cast<int>(machines[m].size()), Tuning{});
    for (std::size_t i = 0; i < inner.size(); ++i) {
      const auto rank = static_cast<std::size_t>(machines[m][i]);
      world.inner[rank] = std::move(inner[i]);
      world.places[rank] = {static_cast<int>(m), "127.0.0.1", world.listeners[rank]->port()};
    }
  }
  return world;
}

NetRanks connect(const Machines& machines) {
  const World world = make_world(machines);
  NetRanks ranks(world.places.size());
  in_threads(static_cast<int>(ranks.size()), [&](int r) {
    const auto i = static_cast<std::size_t>(r);
    auto connections = net::connect_ranks(*world.listeners[i], r, world.places, {},
                                          std::chrono::seconds(20), *patient().caller, [] {});
    ranks[i] =
        std::make_unique<NetCommunicator>(world.inner[i], r, world.places, std::move(connections));
  });
  return ranks;
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
template <class Call>
ErrorCode code_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  throw Failure("no error");
}

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
    with_machines({{0, 1}, {2}}, [interrupted](NetCommunicator& c) {
      if (c.rank() == interrupted) {
        TestCaller caller;
        caller.interrupted = true;
        // Another rank is late, so that this rank waits.
        try {
          c.barrier({std::chrono::seconds(20), &caller});
          CHECK(false);
        } catch (const Failure&) {
        }
        CHECK(code_of([&] { c.barrier(patient()); }) == ErrorCode::kPeerFailure);
        return;
      }
      if (c.rank() == (interrupted + 1) % 3) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
      }
      CHECK(code_of([&] {
              c.barrier(patient());  // may end, since the interrupted rank has arrived
              c.barrier(patient());
            }) == ErrorCode::kPeerFailure);
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

// Calls `body` in a forked child, and returns whether it returned true.
template <class Body>
bool in_child(const Body& body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  CHECK(::waitpid(pid, &status, 0) == pid);
  return status == 0;
}

CASE(forked_children_have_no_connections) {
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  net::guard_from_forks(pair[0]);
  const auto is_socket = [&] {
    struct stat info{};
    return ::fstat(pair[0], &info) == 0 && S_ISSOCK(info.st_mode);
  };
  CHECK(!in_child(is_socket));
  CHECK(is_socket());
  CHECK(in_child([&] {  // what a child opens at the number is its own
    ::dup2(pair[1], pair[0]);
    return in_child(is_socket);
  }));
  net::unguard_from_forks(pair[0]);
  CHECK(in_child(is_socket));
  ::close(pair[0]);
  ::close(pair[1]);
}

CASE(a_rank_that_leaves_ends_the_meeting) {
  const Machines machines{{0}, {1}, {2}};
  const World world = make_world(machines);
  const auto start = std::chrono::steady_clock::now();
  in_threads(3, [&](int r) {
    if (r == 2) return;  // never connects
    const auto code = code_of([&] {
      (void)net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places, {},
                               std::chrono::seconds(60), *patient().caller, [&] {
                                 if (r == 0 && std::chrono::steady_clock::now() - start >
                                                   std::chrono::milliseconds(300)) {
                                   throw Error(ErrorCode::kPeerFailure, "rank 2 has died", {2});
                                 }
                               });
    });
    CHECK(code == ErrorCode::kPeerFailure);
  });
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
}

FileDescriptor connect_to(const Place& place) {
  FileDescriptor fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(place.port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  return fd;
}

template <class T>
bool hears(const FileDescriptor& fd, T& object) {
  return ::recv(fd.get(), &object, sizeof(T), MSG_WAITALL) == static_cast<ssize_t>(sizeof(T));
}

template <class T>
bool say(const FileDescriptor& fd, const T& object) {
  return ::send(fd.get(), &object, sizeof(T), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(T));
}

// Connects to rank 0 as rank `rank`; returns no connection if it is not welcome.
FileDescriptor connect_as(std::uint32_t rank, Purpose purpose, const Place& place,
                          const net::Token& token = {}) {
  FileDescriptor fd = connect_to(place);
  const net::Hello hello{.rank = rank, .purpose = purpose, .nonce = net::make_nonce()};
  net::Challenge challenge;
  std::byte welcome{};
  if (say(fd, hello) && hears(fd, challenge) &&
      say(fd, proof_of(net::Side::kConnects, token, hello, 0, challenge.nonce)) &&
      hears(fd, welcome) && welcome == net::kWelcome) {
    return fd;
  }
  return FileDescriptor();
}

// Rank 1 connects to rank 0 and leaves, before rank 2 has come.
CASE(a_rank_that_has_closed_the_communicator_does_not_end_the_meeting) {
  for (const bool closes : {true, false}) {
    const World world = make_world({{0}, {1}, {2}});
    const auto connect_all = [&world](std::uint32_t rank) {
      std::vector<FileDescriptor> ours;
      for (const Purpose purpose : {Purpose::kOut, Purpose::kIn, Purpose::kStream}) {
        ours.push_back(connect_as(rank, purpose, world.places[0]));
        CHECK(ours.back().get() >= 0);
      }
      return ours;
    };
    std::atomic<int> turns{0};
    std::atomic<bool> ended{false};
    in_threads(2, [&](int r) {
      if (r == 0) {
        std::optional<ErrorCode> code;
        try {
          (void)net::connect_ranks(*world.listeners[0], 0, world.places, {},
                                   std::chrono::seconds(20), *patient().caller, [&] { ++turns; });
        } catch (const Error& error) {
          code = error.code();
        }
        ended = true;
        CHECK(code == (closes ? std::nullopt : std::optional(ErrorCode::kPeerFailure)));
        return;
      }
      {
        const auto ours = connect_all(1);
        if (closes) net::AnswerWriter(ours[1].get()).tell_closed();
      }
      for (const int seen = turns; turns < seen + 3 && !ended;) std::this_thread::yield();
      if (!ended) (void)connect_all(2);
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

CASE(strangers_do_not_disturb_the_meeting) {
  const Machines machines{{0}, {1}};
  const World world = make_world(machines);
  std::vector<FileDescriptor> strangers;
  for (const std::string text : {"", "GET / HTTP/1.1\r\n\r\n and so on, more than a greeting"}) {
    FileDescriptor fd = connect_to(world.places[0]);
    CHECK(::send(fd.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
    strangers.push_back(std::move(fd));
  }
  in_threads(2, [&](int r) {
    const auto found =
        net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places, {},
                           std::chrono::seconds(20), *patient().caller, [] {});
    CHECK(found[static_cast<std::size_t>(1 - r)].stream.get() >= 0);
  });
}

CASE(other_jobs_are_refused) {
  const Machines machines{{0}, {1}};
  const World world = make_world(machines);
  in_threads(2, [&](int r) {
    net::Token token{};
    token[0] = static_cast<std::byte>(r);
    const auto code = code_of([&] {
      (void)net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places,
                               token, std::chrono::seconds(1), *patient().caller, [] {});
    });
    CHECK(code == (r == 0 ? ErrorCode::kTimeout : ErrorCode::kPeerFailure));
  });
}

// Rank 1 is late; meanwhile strangers try to take its place.
CASE(strangers_cannot_take_a_rank) {
  const World world = make_world({{0}, {1}});
  const net::Token token{std::byte{7}};
  const auto meet = [&](int r) {
    return net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places, token,
                              std::chrono::seconds(20), *patient().caller, [] {});
  };
  in_threads(2, [&](int r) {
    if (r == 0) {
      CHECK(meet(0)[1].stream.get() >= 0);
      return;
    }
    for (const Purpose purpose : {Purpose::kOut, Purpose::kIn, Purpose::kStream}) {
      CHECK(connect_as(1, purpose, world.places[0]).get() < 0);  // without the token
      // An answer to an earlier challenge.
      const net::Hello hello{.rank = 1, .purpose = purpose, .nonce = net::make_nonce()};
      net::Challenge first, second;
      std::byte welcome{};
      CHECK(say(connect_to(world.places[0]), hello));
      const FileDescriptor once = connect_to(world.places[0]);
      CHECK(say(once, hello) && hears(once, first));
      const net::Digest proof = proof_of(net::Side::kConnects, token, hello, 0, first.nonce);
      const FileDescriptor again = connect_to(world.places[0]);
      CHECK(say(again, hello) && hears(again, second) && second.nonce != first.nonce);
      CHECK(say(again, proof) && !hears(again, welcome));
      // The acceptor's own proof.
      CHECK(say(once, first.proof) && !hears(once, welcome));
    }
    for (const std::uint32_t rank : {0U, 2U, 0x80000000U, 0xffffffffU}) {
      CHECK(connect_as(rank, Purpose::kStream, world.places[0], token).get() < 0);
    }
    for (const std::uint32_t purpose : {3U, 0x80000000U, 0xffffffffU}) {
      CHECK(connect_as(1, static_cast<Purpose>(purpose), world.places[0], token).get() < 0);
    }
    CHECK(meet(1)[0].stream.get() >= 0);
  });
}

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* at = reinterpret_cast<const std::byte*>(text.data());
  return {at, at + text.size()};
}

std::string hex(const net::Digest& digest) {
  std::string text;
  for (const std::byte b : digest) {
    for (const int shift : {4, 0})
      text += "0123456789abcdef"[std::to_integer<int>(b) >> shift & 15];
  }
  return text;
}

CASE(hashes_of_known_messages) {  // FIPS 180-4, and lengths around a block
  CHECK(hex(net::sha256({})) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(net::sha256(bytes_of("abc"))) ==
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(net::sha256(bytes_of(std::string(1'000'000, 'a')))) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  CHECK(hex(net::sha256(bytes_of(std::string(55, 'a')))) ==
        "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  CHECK(hex(net::sha256(bytes_of(std::string(56, 'a')))) ==
        "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  CHECK(hex(net::sha256(bytes_of(std::string(64, 'a')))) ==
        "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

CASE(codes_of_rfc_4231) {
  const auto repeated = [](int byte, std::size_t n) {
    return std::string(n, static_cast<char>(byte));
  };
  const std::string large = "Test Using Larger Than Block-Size Key - Hash Key First";
  const std::string both =
      "This is a test using a larger than block-size key and a larger than block-size data. The "
      "key needs to be hashed before being used by the HMAC algorithm.";
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  const std::array<std::array<std::string, 3>, 6> vectors{{
      {repeated(0x0b, 20), "Hi There",
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?",
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {repeated(0xaa, 20), repeated(0xdd, 50),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting, repeated(0xcd, 50),
       "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {repeated(0xaa, 131), large,
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {repeated(0xaa, 131), both,
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  }};
  for (const auto& [key, message, code] : vectors) {
    CHECK(hex(net::hmac_sha256(bytes_of(key), bytes_of(message))) == code);
  }
  net::Digest a{}, b{};
  CHECK(net::is_equal(a, b));
  b.back() = std::byte{1};
  CHECK(!net::is_equal(a, b));
}

}  // namespace
}  // namespace fastdist::test
