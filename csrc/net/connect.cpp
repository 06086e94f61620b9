#include "net/connect.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "core/error.h"

namespace fastdist::net {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kRetryInterval{200};
// How long a stranger may stay silent before its connection is closed.
constexpr std::chrono::seconds kLongestSilence{10};
// How often a missing rank is probed, and the number of refusals in a row that show its death.
constexpr std::chrono::seconds kProbeInterval{1};
constexpr int kMostRefusals = 2;
// Number of connections, in addition to those of ranks, that may wait for authentication.
constexpr int kMaxStrangers = 64;

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  [[nodiscard]] const sockaddr* get() const noexcept {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
};

Address resolve(const std::string& ip, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(ip.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw Error(ErrorCode::kValue, "expected a numeric IP address, got \"" + ip + "\"");
  }
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  ::freeaddrinfo(found);
  return address;
}

FileDescriptor open_socket(const Address& address) {
  FileDescriptor fd(
      ::socket(address.get()->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) throw system_error("cannot open a connection to another rank; see ulimit -n");
  return fd;
}

// Sends immediately, and probes an idle peer every second to notice a cut cable. The number of
// probes is not a limit: the connection survives an outage of ten minutes.
void set_options(int fd, bool probes) {
  const auto set = [fd](int level, int name, int value) {
    (void)::setsockopt(fd, level, name, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  if (!probes) return;
  set(IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 600'000);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
}

int error_of(const FileDescriptor& fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  (void)::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

// True for errors that may be temporary: a network outage, or a rank that closes connections
// because too many strangers connect to it.
bool may_pass(int error) {
  switch (error) {
    case ECONNRESET:
    case EPIPE:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
    case ETIMEDOUT:
      return true;
    default:
      return false;
  }
}

std::string endpoint(const Place& place) {
  return place.ip + " port " + std::to_string(place.port);
}

class Rendezvous {
 public:
  Rendezvous(const Listener& listener, int rank, const std::vector<Place>& places, const Sign& sign)
      : listener_(listener),
        rank_(rank),
        places_(places),
        sign_(sign),
        found_(places.size()),
        outages_(places.size()),
        probes_(places.size()) {
    for (int p = 0; p < static_cast<int>(places.size()); ++p) {
      if (p == rank) continue;
      missing_ += static_cast<int>(purposes(p));
      if (p > rank) continue;
      for (std::uint32_t purpose = 0; purpose < purposes(p); ++purpose) {
        pending_.push_back({.rank = p, .purpose = static_cast<Purpose>(purpose)});
        begin(pending_.back());
      }
    }
  }

  std::vector<Connections> run(std::chrono::nanoseconds timeout, const Caller& caller,
                               const std::function<void()>& check) {
    const auto start = Clock::now();
    while (missing_ > 0) {
      if (Clock::now() - start > timeout) throw_late();
      wait();
      caller.check_interrupt();
      check();
      accept_some();
      for (Pending& one : pending_) {
        if (!one.is_done) advance(one);
      }
      close_strangers(missing_ + kMaxStrangers);
      std::erase_if(pending_, [](const Pending& one) { return one.is_done; });
      check_connected();
      if (Clock::now() >= next_probe_) probe_missing();
    }
    return std::move(found_);
  }

 private:
  enum class Step { kBegin, kConnect, kChallenge, kWelcome, kHello, kProof };
  // An unfinished connection: to a lower rank, or from a process whose rank is still unknown.
  struct Pending {
    int rank = -1;
    Purpose purpose = Purpose::kStream;
    FileDescriptor fd{};
    Step step = Step::kBegin;
    Hello hello{};
    Challenge challenge{};
    Digest proof{};
    std::size_t at = 0;                      // bytes read of the object that this step awaits
    Clock::time_point since = Clock::now();  // when accepted, or when to begin
    bool is_done = false;
  };
  enum class Got { kAll, kPart, kEnd };
  // A connection to a missing higher rank, to which it looks like that of a silent stranger.
  struct Probe {
    FileDescriptor fd{};
    int refusals = 0;  // in a row
  };

  // There are no streams between ranks of one machine.
  [[nodiscard]] std::uint32_t purposes(int p) const {
    const bool is_here = places_[static_cast<std::size_t>(p)].machine ==
                         places_[static_cast<std::size_t>(rank_)].machine;
    return is_here ? kPurposes - 1 : kPurposes;
  }

  [[nodiscard]] bool is_connected(int p) const {
    const Connections& c = found_[static_cast<std::size_t>(p)];
    const bool streams = c.stream.get() >= 0 || purposes(p) < kPurposes;
    return streams && c.out.get() >= 0 && c.in.get() >= 0;
  }

  void begin(Pending& one) {
    const Place& place = places_[static_cast<std::size_t>(one.rank)];
    const Address address = resolve(place.ip, place.port);
    one.fd = open_socket(address);
    set_options(one.fd.get(), one.purpose == Purpose::kStream);
    one.step = Step::kConnect;
    if (::connect(one.fd.get(), address.get(), address.length) == 0 || errno == EINPROGRESS) return;
    retry_or_throw(one, errno);
  }

  // Retries until the deadline if the error may pass, because a cable may be unplugged briefly.
  void retry_or_throw(Pending& one, int error) {
    if (!may_pass(error)) throw_unreachable(one, error);
    outages_[static_cast<std::size_t>(one.rank)] = error;
    one.fd = FileDescriptor();
    one.step = Step::kBegin;
    one.at = 0;
    one.since = Clock::now() + kRetryInterval;
  }

  [[noreturn]] void throw_unreachable(const Pending& one, int error) const {
    throw Error(ErrorCode::kPeerFailure,
                "rank " + std::to_string(rank_) + " cannot connect to rank " +
                    std::to_string(one.rank) + " at " +
                    endpoint(places_[static_cast<std::size_t>(one.rank)]) + ": " +
                    std::strerror(error),
                {one.rank});
  }

  [[noreturn]] void throw_impostor(const Pending& one) const {
    throw Error(ErrorCode::kPeerFailure,
                "rank " + std::to_string(rank_) + " found another program than rank " +
                    std::to_string(one.rank) + " of its job at " +
                    endpoint(places_[static_cast<std::size_t>(one.rank)]),
                {one.rank});
  }

  [[noreturn]] void throw_late() const {
    std::vector<int> ranks;
    std::string names;
    for (int p = 0; p < static_cast<int>(places_.size()); ++p) {
      if (p == rank_ || is_connected(p)) continue;
      const int outage = outages_[static_cast<std::size_t>(p)];
      names += (names.empty() ? "" : ", ") + std::to_string(p) + " (" +
               places_[static_cast<std::size_t>(p)].ip +
               (outage != 0 ? std::string(": ") + std::strerror(outage) : "") + ")";
      ranks.push_back(p);
    }
    throw Error(
        ErrorCode::kTimeout,
        "rank " + std::to_string(rank_) + " at " + places_[static_cast<std::size_t>(rank_)].ip +
            " could not connect in time to rank " + names + "; is a firewall between the machines?",
        std::move(ranks));
  }

  void wait() {
    std::vector<pollfd> fds{{listener_.fd(), POLLIN, 0}};
    for (const Pending& one : pending_) {
      fds.push_back(
          {one.fd.get(), static_cast<short>(one.step == Step::kConnect ? POLLOUT : POLLIN), 0});
    }
    (void)::poll(fds.data(), fds.size(), static_cast<int>(kPollInterval.count()));
  }

  // A rank that fails during the rendezvous closes its connections without a message. A rank that
  // has connected to all may already have closed the communicator; it sends a message first, which
  // concerns later calls and not the rendezvous.
  void check_connected() const {
    for (std::size_t p = 0; p < found_.size(); ++p) {
      pollfd state{found_[p].out.get(), POLLRDHUP, 0};
      if (state.fd < 0 || ::poll(&state, 1, 0) <= 0 || missing_ == 0) continue;
      std::byte word{};
      if (::recv(state.fd, &word, 1, MSG_PEEK | MSG_DONTWAIT) > 0) continue;
      throw Error(ErrorCode::kPeerFailure,
                  "rank " + std::to_string(p) + " has left while the ranks connected",
                  {static_cast<int>(p)});
    }
  }

  // A higher rank connects to this one, so its death shows only at its listener, which stays open
  // until that rank is connected to all. A probe stays open until the rank's process ends, and so
  // does not fill the listener's queue. One refusal may come from a firewall while the rank starts.
  void probe_missing() {
    next_probe_ = Clock::now() + kProbeInterval;
    for (int p = rank_ + 1; p < static_cast<int>(places_.size()); ++p) {
      if (is_connected(p)) continue;
      Probe& probe = probes_[static_cast<std::size_t>(p)];
      if (probe.fd.get() >= 0) {
        pollfd state{probe.fd.get(), POLLRDHUP, 0};
        if (::poll(&state, 1, 0) == 0) continue;  // connected, or not yet
        note_end(probe, error_of(probe.fd));
      }
      if (probe.refusals < kMostRefusals) {
        begin(probe, places_[static_cast<std::size_t>(p)]);
        continue;
      }
      throw Error(ErrorCode::kPeerFailure,
                  "rank " + std::to_string(p) + " has died or failed before it connected to rank " +
                      std::to_string(rank_) + ": nothing listens any more at " +
                      endpoint(places_[static_cast<std::size_t>(p)]),
                  {p});
    }
  }

  static void begin(Probe& probe, const Place& place) {
    const Address address = resolve(place.ip, place.port);
    probe.fd = FileDescriptor(
        ::socket(address.get()->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (probe.fd.get() < 0) return;  // no file descriptor is free; see accept_some
    if (::connect(probe.fd.get(), address.get(), address.length) == 0) return;
    if (errno != EINPROGRESS) note_end(probe, errno);
  }

  static void note_end(Probe& probe, int error) {
    probe.fd = FileDescriptor();
    probe.refusals = error == ECONNREFUSED ? probe.refusals + 1 : 0;
  }

  // Accepts as many connections as ranks may open, and some from strangers; the rest wait for the
  // next turn.
  void accept_some() {
    for (int left = missing_ + kMaxStrangers; left > 0; --left) {
      FileDescriptor fd(::accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (fd.get() >= 0) {
        pending_.push_back({.fd = std::move(fd), .step = Step::kHello});
        continue;
      }
      if (errno != EMFILE && errno != ENFILE) return;
      const int error = errno;
      if (close_strangers(0) > 0) continue;
      errno = error;
      throw system_error("cannot accept another rank; see ulimit -n");
    }
  }

  // Closes all but the latest `kept` connections from processes that have not authenticated;
  // returns how many it closed. A rank among them connects again.
  int close_strangers(int kept) {
    const auto is_stranger = [](const Pending& one) {
      return !one.is_done && (one.step == Step::kHello || one.step == Step::kProof);
    };
    const int surplus = static_cast<int>(std::ranges::count_if(pending_, is_stranger)) - kept;
    int closed = 0;
    for (Pending& one : pending_) {
      if (closed >= surplus) break;
      if (!is_stranger(one)) continue;
      one.is_done = true;
      one.fd = FileDescriptor();
      ++closed;
    }
    return closed;
  }

  void advance(Pending& one) {
    if (one.step == Step::kBegin && Clock::now() >= one.since) begin(one);
    if (one.step == Step::kConnect) {
      pollfd state{one.fd.get(), POLLOUT, 0};
      if (::poll(&state, 1, 0) == 0) return;
      if (const int error = error_of(one.fd); error != 0) return retry_or_throw(one, error);
      one.hello.rank = static_cast<std::uint32_t>(rank_);
      one.hello.purpose = one.purpose;
      one.hello.nonce = make_nonce();
      if (!say(one, one.hello)) return retry_or_throw(one, errno);
      one.step = Step::kChallenge;
    }
    if (one.step == Step::kChallenge) {
      const Got got = read(one, one.challenge);
      if (got == Got::kPart) return;
      if (got == Got::kEnd) return retry_or_throw(one, errno);
      if (!is_equal(one.challenge.proof, proof_of(Side::kAccepts, one, one.rank))) {
        throw_impostor(one);
      }
      if (!say(one, proof_of(Side::kConnects, one, one.rank))) return retry_or_throw(one, errno);
      one.step = Step::kWelcome;
    }
    if (one.step == Step::kWelcome) {
      std::byte answer{};
      const Got got = read(one, answer);
      if (got == Got::kPart) return;
      if (got == Got::kEnd) return retry_or_throw(one, errno);
      keep(one, one.rank, one.purpose);
    }
    if (one.step == Step::kHello) {
      if (!hears(one, one.hello)) return;
      const auto rank = static_cast<int>(one.hello.rank);
      one.is_done = one.hello.magic != Hello{}.magic || rank <= rank_ ||
                    rank >= static_cast<int>(places_.size()) ||
                    static_cast<std::uint32_t>(one.hello.purpose) >= purposes(rank);
      if (one.is_done) return;
      one.challenge.nonce = make_nonce();
      one.challenge.proof = proof_of(Side::kAccepts, one, rank_);
      one.is_done = !say(one, one.challenge);
      one.step = Step::kProof;
    }
    if (one.step == Step::kProof) {
      if (!hears(one, one.proof)) return;
      one.is_done = !is_equal(one.proof, proof_of(Side::kConnects, one, rank_));
      if (one.is_done) return;
      const Purpose theirs = one.hello.purpose;
      set_options(one.fd.get(), theirs == Purpose::kStream);
      (void)say(one, kWelcome);
      keep(one, static_cast<int>(one.hello.rank),
           theirs == Purpose::kOut  ? Purpose::kIn
           : theirs == Purpose::kIn ? Purpose::kOut
                                    : Purpose::kStream);
    }
  }

  [[nodiscard]] Digest proof_of(Side side, const Pending& one, int acceptor) const {
    return net::proof_of(side, sign_, one.hello, static_cast<std::uint32_t>(acceptor),
                         one.challenge.nonce);
  }

  // Sends an object. An empty send buffer takes so few bytes whole.
  template <class T>
  [[nodiscard]] bool say(const Pending& one, const T& object) {
    return ::send(one.fd.get(), &object, sizeof(object), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(sizeof(object));
  }

  // Reads the next bytes of an object; sets errno if the connection has ended.
  template <class T>
  [[nodiscard]] Got read(Pending& one, T& object) {
    auto* bytes = reinterpret_cast<std::byte*>(&object);
    const ssize_t got = ::recv(one.fd.get(), bytes + one.at, sizeof(T) - one.at, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Got::kPart;
    if (got == 0) errno = ECONNRESET;
    if (got <= 0) return Got::kEnd;
    one.at += static_cast<std::size_t>(got);
    if (one.at < sizeof(T)) return Got::kPart;
    one.at = 0;
    return Got::kAll;
  }

  // Reads from a process that has not authenticated; drops it if it ends or stays silent.
  template <class T>
  [[nodiscard]] bool hears(Pending& one, T& object) {
    const Got got = read(one, object);
    one.is_done = got == Got::kEnd || Clock::now() - one.since > kLongestSilence;
    return got == Got::kAll && !one.is_done;
  }

  void keep(Pending& one, int rank, Purpose purpose) {
    Connections& c = found_[static_cast<std::size_t>(rank)];
    FileDescriptor& kept = purpose == Purpose::kStream ? c.stream
                           : purpose == Purpose::kOut  ? c.out
                                                       : c.in;
    one.is_done = true;
    if (kept.get() < 0) --missing_;
    probes_[static_cast<std::size_t>(rank)] = {};
    kept = std::move(one.fd);  // the latest one, if a connection was lost and made again
  }

  const Listener& listener_;
  int rank_;
  const std::vector<Place>& places_;
  const Sign& sign_;
  std::vector<Connections> found_;
  std::vector<int> outages_;   // by rank: the last error of connecting to it
  std::vector<Probe> probes_;  // by rank
  Clock::time_point next_probe_ = Clock::now() + kProbeInterval;
  std::vector<Pending> pending_;
  int missing_ = 0;
};

}  // namespace

Listener::Listener(const std::string& ip) {
  const Address address = resolve(ip, 0);
  socket_ = open_socket(address);
  if (::bind(socket_.get(), address.get(), address.length) != 0 ||
      ::listen(socket_.get(), SOMAXCONN) != 0) {
    throw system_error("cannot listen at " + ip);
  }
}

std::uint16_t Listener::port() const {
  Address address;
  address.length = sizeof(address.storage);
  if (::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address.storage),
                    &address.length) != 0) {
    throw system_error("getsockname");
  }
  return ntohs(address.storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

std::vector<Connections> connect_ranks(const Listener& listener, int rank,
                                       const std::vector<Place>& places, const Sign& sign,
                                       std::chrono::nanoseconds timeout, const Caller& caller,
                                       const std::function<void()>& check) {
  return Rendezvous(listener, rank, places, sign).run(timeout, caller, check);
}

}  // namespace fastdist::net
