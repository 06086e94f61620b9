// The greeting on a new connection, by which two ranks prove to each other that both have the key
// of the communicator:
//
//   the rank that connects    Hello      its rank, the purpose of the connection, a random number
//   the rank that accepts     Challenge  a random number, and a proof
//   the rank that connects    a proof
//   the rank that accepts     kWelcome
//
// A proof is the HMAC of everything that both have said and of their ranks, so that nobody can use
// it on another connection. The rank that connects is the first to know that it has reached its
// peer, but keeps the connection only after kWelcome.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace fastdist::net {

using Digest = std::array<std::byte, 32>;
// Returns the HMAC-SHA256 of a message by the key that only the ranks of one communicator have.
using Sign = std::function<Digest(std::span<const std::byte>)>;
using Nonce = std::array<std::byte, 16>;

enum class Purpose : std::uint32_t { kOut, kIn, kStream };  // as the rank that connects sees it
inline constexpr std::uint32_t kPurposes = 3;

struct Hello {
  std::array<char, 8> magic{'f', 'a', 's', 't', 'd', 'i', 's', 't'};
  std::uint32_t rank = 0;
  Purpose purpose = Purpose::kStream;
  Nonce nonce{};
};

struct Challenge {
  Nonce nonce{};
  Digest proof{};
};

inline constexpr std::byte kWelcome{1};

enum class Side : std::uint32_t { kConnects, kAccepts };

// Returns the proof of one side. `acceptor` is the rank that accepts, `nonce` its random number.
[[nodiscard]] Digest proof_of(Side side, const Sign& sign, const Hello& hello,
                              std::uint32_t acceptor, const Nonce& nonce);

// Takes the same time wherever the digests differ.
[[nodiscard]] bool is_equal(const Digest& a, const Digest& b) noexcept;

[[nodiscard]] Nonce make_nonce();

}  // namespace fastdist::net
