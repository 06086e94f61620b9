// How ranks of several machines connect, and what strangers can do meanwhile.

#include <poll.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "machines.h"
#include "net/answers.h"
#include "net/connect.h"
#include "net/hello.h"
#include "world.h"

namespace fastdist::test {
namespace {

void await_connection(const Listener& listener) {
  pollfd state{listener.fd(), POLLIN, 0};
  CHECK(::poll(&state, 1, 10'000) == 1);
}

CASE(a_rank_that_leaves_ends_the_rendezvous) {
  const Machines machines{{0}, {1}, {2}};
  const World world = make_world(machines);
  const auto start = std::chrono::steady_clock::now();
  in_threads(3, [&](int r) {
    if (r == 2) return;  // never connects
    const auto code = code_of([&] {
      (void)net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places,
                               signed_by(0), std::chrono::seconds(60), *patient().caller, [&] {
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

// Rank 1 connects to rank 0 and leaves, before rank 2 has come.
CASE(a_rank_that_has_closed_the_communicator_does_not_end_the_rendezvous) {
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
          (void)net::connect_ranks(*world.listeners[0], 0, world.places, signed_by(0),
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

// Rank 1 has told its address, and goes before or while rank 0 waits for it to connect.
CASE(a_rank_that_goes_before_it_connects_ends_the_rendezvous) {
  for (const bool is_seen : {false, true}) {
    World world = make_world({{0}, {1}});
    if (!is_seen) world.listeners[1].reset();
    in_threads(2, [&](int r) {
      if (r == 1) {
        if (is_seen) await_connection(*world.listeners[1]);
        world.listeners[1].reset();
        return;
      }
      const auto start = std::chrono::steady_clock::now();
      const Error error = CHECK_THROWS(
          ErrorCode::kPeerFailure,
          (void)net::connect_ranks(*world.listeners[0], 0, world.places, signed_by(0),
                                   std::chrono::seconds(60), *patient().caller, [] {}));
      CHECK(error.ranks() == std::vector{1});
      CHECK(std::string(error.what()).starts_with("rank 1 has died or failed before"));
      CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
    });
  }
}

// Rank 1 comes after rank 0 has probed its listener, which shows no other connection meanwhile.
CASE(a_late_rank_is_probed_and_not_disturbed) {
  const World world = make_world({{0}, {1}});
  in_threads(2, [&](int r) {
    if (r == 1) {
      await_connection(*world.listeners[1]);
      FileDescriptor probe(::accept(world.listeners[1]->fd(), nullptr, nullptr));
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      CHECK(::accept(world.listeners[1]->fd(), nullptr, nullptr) < 0);
      probe = FileDescriptor();
      await_connection(*world.listeners[1]);  // again
    }
    const auto found =
        net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places,
                           signed_by(0), std::chrono::seconds(20), *patient().caller, [] {});
    CHECK(found[static_cast<std::size_t>(1 - r)].stream.get() >= 0);
  });
}

CASE(strangers_do_not_disturb_the_rendezvous) {
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
        net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places,
                           signed_by(0), std::chrono::seconds(20), *patient().caller, [] {});
    CHECK(found[static_cast<std::size_t>(1 - r)].stream.get() >= 0);
  });
}

// Strangers that say nothing hold more connections than this process may open beside its own.
CASE(many_silent_strangers_do_not_end_the_rendezvous) {
  const World world = make_world({{0}, {1}});
  std::vector<FileDescriptor> strangers;
  for (int i = 0; i < 500; ++i) strangers.push_back(connect_to(world.places[0]));
  rlimit usual{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &usual) == 0);
  const rlimit few{static_cast<rlim_t>(strangers.back().get()) + 200, usual.rlim_max};
  CHECK(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  in_threads(2, [&](int r) {
    const auto found =
        net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places,
                           signed_by(0), std::chrono::seconds(20), *patient().caller, [] {});
    CHECK(found[static_cast<std::size_t>(1 - r)].stream.get() >= 0);
  });
  CHECK(::setrlimit(RLIMIT_NOFILE, &usual) == 0);
}

CASE(other_jobs_are_refused) {
  const Machines machines{{0}, {1}};
  const World world = make_world(machines);
  in_threads(2, [&](int r) {
    const net::Sign sign = signed_by(r);
    const auto code = code_of([&] {
      (void)net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places, sign,
                               std::chrono::seconds(1), *patient().caller, [] {});
    });
    CHECK(code == (r == 0 ? ErrorCode::kTimeout : ErrorCode::kPeerFailure));
  });
}

// Rank 1 is late; meanwhile strangers try to take its place.
CASE(strangers_cannot_take_a_rank) {
  const World world = make_world({{0}, {1}});
  const net::Sign sign = signed_by(7);
  const auto meet = [&](int r) {
    return net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places, sign,
                              std::chrono::seconds(20), *patient().caller, [] {});
  };
  in_threads(2, [&](int r) {
    if (r == 0) {
      CHECK(meet(0)[1].stream.get() >= 0);
      return;
    }
    for (const Purpose purpose : {Purpose::kOut, Purpose::kIn, Purpose::kStream}) {
      CHECK(connect_as(1, purpose, world.places[0]).get() < 0);  // without the key
      // An answer to an earlier challenge.
      const net::Hello hello{.rank = 1, .purpose = purpose, .nonce = net::make_nonce()};
      net::Challenge first, second;
      std::byte welcome{};
      CHECK(say(connect_to(world.places[0]), hello));
      const FileDescriptor once = connect_to(world.places[0]);
      CHECK(say(once, hello) && hears(once, first));
      const net::Digest proof = proof_of(net::Side::kConnects, sign, hello, 0, first.nonce);
      const FileDescriptor again = connect_to(world.places[0]);
      CHECK(say(again, hello) && hears(again, second) && second.nonce != first.nonce);
      CHECK(say(again, proof) && !hears(again, welcome));
      // The acceptor's own proof.
      CHECK(say(once, first.proof) && !hears(once, welcome));
    }
    for (const std::uint32_t rank : {0U, 2U, 0x80000000U, 0xffffffffU}) {
      CHECK(connect_as(rank, Purpose::kStream, world.places[0], sign).get() < 0);
    }
    for (const std::uint32_t purpose : {3U, 0x80000000U, 0xffffffffU}) {
      CHECK(connect_as(1, static_cast<Purpose>(purpose), world.places[0], sign).get() < 0);
    }
    CHECK(meet(1)[0].stream.get() >= 0);
  });
}

CASE(digests_are_equal_in_all_bytes) {
  net::Digest a{}, b{};
  CHECK(net::is_equal(a, b));
  b.back() = std::byte{1};
  CHECK(!net::is_equal(a, b));
}

}  // namespace
}  // namespace fastdist::test
