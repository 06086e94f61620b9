// A bijection between ids and random-looking keys.
#pragma once

#include <cstdint>

namespace fastdist::table {

// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
// 2014): changing one bit of x changes half of the result's bits.
inline constexpr std::uint64_t kFirstFactor = 0xBF58476D1CE4E5B9U;
inline constexpr std::uint64_t kSecondFactor = 0x94D049BB133111EBU;

[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ x >> 30) * kFirstFactor;
  x = (x ^ x >> 27) * kSecondFactor;
  return x ^ x >> 31;
}

// The factors' inverses modulo 2⁶⁴.
inline constexpr std::uint64_t kFirstInverse = 0x96DE1B173F119089U;
inline constexpr std::uint64_t kSecondInverse = 0x319642B2D24D8EC3U;
static_assert(kFirstFactor * kFirstInverse == 1 && kSecondFactor * kSecondInverse == 1);

[[nodiscard]] constexpr std::uint64_t unmix(std::uint64_t x) noexcept {
  x = (x ^ x >> 31 ^ x >> 62) * kSecondInverse;
  x = (x ^ x >> 27 ^ x >> 54) * kFirstInverse;
  return x ^ x >> 30 ^ x >> 60;
}

// Returns the key of an id in a hashed table. Distinct ids have distinct keys, so the id itself is
// not stored. The constant makes keys independent of other uses of `mix`, such as routing between
// servers: otherwise the ids of one server would crowd one part of its index.
inline constexpr std::uint64_t kSalt = 0x6A09E667F3BCC909U;
[[nodiscard]] constexpr std::uint64_t key_of(std::uint64_t id) noexcept { return mix(id ^ kSalt); }
[[nodiscard]] constexpr std::uint64_t id_of(std::uint64_t key) noexcept {
  return unmix(key) ^ kSalt;
}

static_assert(id_of(key_of(0)) == 0 && id_of(key_of(~std::uint64_t{5})) == ~std::uint64_t{5});

}  // namespace fastdist::table
