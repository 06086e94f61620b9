// HMAC-SHA256 (RFC 2104, FIPS 180-4), for the few bytes by which ranks prove that they have a key.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace fastdist::net {

using Digest = std::array<std::byte, 32>;

[[nodiscard]] Digest sha256(std::span<const std::byte> message);
[[nodiscard]] Digest hmac_sha256(std::span<const std::byte> key,
                                 std::span<const std::byte> message);

// Takes the same time wherever the digests differ.
[[nodiscard]] bool is_equal(const Digest& a, const Digest& b) noexcept;

}  // namespace fastdist::net
