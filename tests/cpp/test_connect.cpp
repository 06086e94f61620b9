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
#include "net/hmac.h"
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
          (void)net::connect_ranks(*world.listeners[0], 0, world.places, {},
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
        net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places, {},
                           std::chrono::seconds(20), *patient().caller, [] {});
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
        net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places, {},
                           std::chrono::seconds(20), *patient().caller, [] {});
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
        net::connect_ranks(*world.listeners[static_cast<std::size_t>(r)], r, world.places, {},
                           std::chrono::seconds(20), *patient().caller, [] {});
    CHECK(found[static_cast<std::size_t>(1 - r)].stream.get() >= 0);
  });
  CHECK(::setrlimit(RLIMIT_NOFILE, &usual) == 0);
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
