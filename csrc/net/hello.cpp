#include "net/hello.h"

#include <sys/random.h>

#include "core/error.h"

namespace fastdist::net {

Digest proof_of(Side side, const Sign& sign, const Hello& hello, std::uint32_t acceptor,
                const Nonce& nonce) {
  const struct {
    Side side;
    std::uint32_t acceptor;
    Hello hello;
    Nonce nonce;
  } said{side, acceptor, hello, nonce};
  static_assert(sizeof(said) == 2 * sizeof(std::uint32_t) + sizeof(Hello) + sizeof(Nonce));
  return sign(std::as_bytes(std::span(&said, 1)));
}

bool is_equal(const Digest& a, const Digest& b) noexcept {
  std::byte difference{};
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{};
}

Nonce make_nonce() {
  Nonce nonce;
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw system_error("getrandom");
  }
  return nonce;
}

}  // namespace fastdist::net
