// Ranks for tests: threads of this process, or forked processes.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "host/communicator.h"
#include "host/machine.h"

namespace fastdist::test {

using host::HostCommunicator;
using host::Machine;
using host::SharedBlock;
using host::Tuning;

inline constexpr int kWorlds[] = {1, 2, 3, 4, 7};

// Fewer rounds under sanitizers, which are slow but find races in fewer rounds.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

class TestCaller final : public Caller {
 public:
  explicit TestCaller(std::string location = "") : location_(std::move(location)) {}
  [[nodiscard]] std::string location() const override { return location_; }
  void check_interrupt() const override {
    if (interrupted) throw Failure("interrupted");
  }
  [[nodiscard]] bool is_only_caller() const override { return true; }
  bool interrupted = false;

 private:
  std::string location_;
};

inline CallOptions patient() {
  static const TestCaller caller;
  return {std::chrono::seconds(60), &caller};
}
inline CallOptions impatient(std::chrono::milliseconds timeout = std::chrono::milliseconds(100)) {
  static const TestCaller caller;
  return {timeout, &caller};
}

// Small thresholds, so that a few hundred bytes reach every method: payloads up to 128 bytes, the
// staging area up to 1 KiB, in place above. Chunks hold at least one line per rank.
inline Tuning tiny_tuning() {
  Tuning tuning;
  tuning.slot_bytes = 128;
  tuning.in_place_bytes = 1024;
  tuning.chunk_bytes = 512;
  tuning.lane_bytes = 96;
  tuning.stream_bytes = 8192;
  return tuning;
}
// Nothing is used in place, even by threads, and payloads are small.
inline Tuning staged_tuning() {
  Tuning tuning = tiny_tuning();
  tuning.slot_bytes = 16;
  tuning.in_place_bytes = ~std::size_t{0};
  return tuning;
}
inline Tuning in_place_tuning() {
  Tuning tuning = tiny_tuning();
  tuning.slot_bytes = 0;
  tuning.in_place_bytes = 0;
  return tuning;
}
inline Tuning payload_tuning() {
  Tuning tuning = tiny_tuning();
  tuning.slot_bytes = std::size_t{1} << 20;
  tuning.in_place_bytes = ~std::size_t{0};
  return tuning;
}

using Ranks = std::vector<std::unique_ptr<HostCommunicator>>;

// All ranks of one process, on a machine that may already have other communicators.
inline Ranks make_thread_ranks(const std::shared_ptr<Machine>& machine, const Tuning& tuning) {
  const int n = machine->size();
  std::vector<std::shared_ptr<SharedBlock>> blocks;
  std::vector<std::size_t> offsets;
  for (int r = 0; r < n; ++r) {
    blocks.push_back(
        std::make_shared<SharedBlock>(machine, r, HostCommunicator::block_bytes(n, tuning)));
    offsets.push_back(blocks.back()->offset());
  }
  std::vector<int> members(static_cast<std::size_t>(n));
  std::iota(members.begin(), members.end(), 0);
  Ranks ranks;
  for (int r = 0; r < n; ++r) {
    ranks.push_back(std::make_unique<HostCommunicator>(
        machine, members, r, offsets, blocks[static_cast<std::size_t>(r)], tuning));
  }
  return ranks;
}
inline Ranks make_thread_ranks(int n, const Tuning& tuning) {
  return make_thread_ranks(Machine::of_threads(n), tuning);
}

// Calls body(rank) in n threads and rethrows the first exception; `on_failure(rank)` may unblock
// the other ranks.
template <class Body, class OnFailure>
void in_threads(int n, Body&& body, OnFailure&& on_failure) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (...) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        on_failure(r);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (first) std::rethrow_exception(first);
}
template <class Body>
void in_threads(int n, Body&& body) {
  in_threads(n, std::forward<Body>(body), [](int) {});
}

// Calls body(communicator) in every rank's thread. A rank whose body throws closes its
// communicator.
template <class Body>
void with_ranks(Ranks& ranks, Body&& body) {
  const auto of = [&](int r) -> HostCommunicator& { return *ranks[static_cast<std::size_t>(r)]; };
  in_threads(
      static_cast<int>(ranks.size()), [&](int r) { body(of(r)); }, [&](int r) { of(r).close(); });
}
template <class Body>
void with_threads(int n, const Tuning& tuning, Body&& body) {
  Ranks ranks = make_thread_ranks(n, tuning);
  with_ranks(ranks, std::forward<Body>(body));
}

// --- processes ----------------------------------------------------------------------------------

inline void send_fd(int socket, int fd) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  if (::sendmsg(socket, &message, 0) != 1) throw system_error("sendmsg");
}

inline FileDescriptor receive_fd(int socket) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))]{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1) throw system_error("recvmsg");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
  return FileDescriptor(fd);
}

// Forked children, each connected to this process by a socket. Fork before starting threads.
class Children {
 public:
  // The child calls body(index, socket to the parent) and exits, with status 0 if nothing was
  // thrown.
  void start(const std::function<void(int, int)>& body) {
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
      throw system_error("socketpair");
    }
    const int index = static_cast<int>(children_.size());
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid < 0) throw system_error("fork");
    if (pid == 0) {
      ::alarm(120);  // do not outlive the test
      ::close(sockets[0]);
      int status = 0;
      try {
        body(index, sockets[1]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "  child %d: %s\n", index, error.what());
        status = 1;
      }
      std::fflush(nullptr);
      ::_exit(status);
    }
    ::close(sockets[1]);
    children_.push_back({pid, FileDescriptor(sockets[0])});
  }
  ~Children() {
    for (Child& child : children_) {
      if (child.pid > 0) ::kill(child.pid, SIGKILL);
    }
    for (int i = 0; i < size(); ++i) (void)wait(i);
  }
  Children() = default;
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  [[nodiscard]] int size() const { return static_cast<int>(children_.size()); }
  [[nodiscard]] int socket(int i) const { return at(i).socket.get(); }
  void kill(int i) { ::kill(at(i).pid, SIGKILL); }
  // Returns the exit status; 128 + the signal number if a signal ended the child; 0 if it was
  // already waited for.
  int wait(int i) {
    Child& child = children_[static_cast<std::size_t>(i)];
    if (child.pid <= 0) return 0;
    int status = 0;
    while (::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
    }
    child.pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  struct Child {
    pid_t pid;
    FileDescriptor socket;
  };
  [[nodiscard]] const Child& at(int i) const { return children_[static_cast<std::size_t>(i)]; }
  std::vector<Child> children_;
};

// Calls body(communicator) in n processes. As in production, every process creates its own segment,
// so that it holds the lock that shows it is alive, and receives the other segments through a
// socket. It never receives its own descriptor, since closing a duplicate would release the lock.
inline void start_process_ranks(Children& children, int n, const Tuning& tuning,
                                const std::function<void(HostCommunicator&)>& body) {
  for (int r = 0; r < n; ++r) {
    children.start([=](int rank, int parent) {
      const std::size_t block_bytes = HostCommunicator::block_bytes(n, tuning);
      std::vector<FileDescriptor> files(static_cast<std::size_t>(n));
      for (int p = 0; p < n; ++p) {
        FileDescriptor& file = files[static_cast<std::size_t>(p)];
        if (p == rank) {
          file = host::create_segment_file(block_bytes);
          send_fd(parent, file.get());
        }
      }
      for (int p = 0; p < n; ++p) {
        if (p != rank) files[static_cast<std::size_t>(p)] = receive_fd(parent);
      }
      const auto machine = std::make_shared<Machine>(std::move(files), rank);
      auto block = std::make_shared<SharedBlock>(machine, rank, block_bytes);
      std::vector<int> members(static_cast<std::size_t>(n));
      std::iota(members.begin(), members.end(), 0);
      const std::vector<std::size_t> offsets(static_cast<std::size_t>(n), block->offset());
      HostCommunicator communicator(machine, members, rank, offsets, std::move(block), tuning);
      body(communicator);
    });
  }
  std::vector<FileDescriptor> files;
  for (int r = 0; r < n; ++r) files.push_back(receive_fd(children.socket(r)));
  for (int r = 0; r < n; ++r) {
    for (int p = 0; p < n; ++p) {
      if (p != r) send_fd(children.socket(r), files[static_cast<std::size_t>(p)].get());
    }
  }
}
inline void with_processes(int n, const Tuning& tuning,
                           const std::function<void(HostCommunicator&)>& body) {
  Children children;
  start_process_ranks(children, n, tuning, body);
  for (int r = 0; r < n; ++r) {
    const int status = children.wait(r);
    CHECK_THAT(status == 0, "rank " << r << " of " << n << " ended with " << status);
  }
}

// --- arrays -------------------------------------------------------------------------------------

// Memory for one array: private, at a random valid alignment, or shared. Private memory is a heap
// block of exactly the needed size, so that sanitizers detect every overrun.
class Array {
 public:
  Array(DType dtype, std::size_t count, std::size_t skip = 0)
      : own_(new std::byte[count * size_of(dtype) + skip]),
        view_{own_.get() + skip, count, dtype, 0} {}
  // Allocates the array in the communicator's shared memory, which other processes can access.
  Array(HostCommunicator& c, DType dtype, std::size_t count)
      : shared_(std::make_shared<SharedBlock>(c.machine(),
                                              c.members()[static_cast<std::size_t>(c.rank())],
                                              std::max<std::size_t>(1, count * size_of(dtype)))),
        view_{shared_->data(), count, dtype, 0} {}

  [[nodiscard]] const TensorView& view() const { return view_; }
  [[nodiscard]] TensorViews views() const { return {&view_, 1}; }
  [[nodiscard]] std::size_t count() const { return view_.count; }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(view_.data);
  }

 private:
  std::unique_ptr<std::byte[]> own_;
  std::shared_ptr<SharedBlock> shared_;
  TensorView view_;
};

template <class T>
inline constexpr DType kDTypeOf = DType::kUInt8;
template <>
inline constexpr DType kDTypeOf<std::int32_t> = DType::kInt32;
template <>
inline constexpr DType kDTypeOf<std::uint64_t> = DType::kUInt64;
template <>
inline constexpr DType kDTypeOf<float> = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<double> = DType::kFloat64;

// Mixes the numbers that identify an element, so that stale or misplaced data is detected.
inline std::uint64_t mix(std::uint64_t call, std::uint64_t rank, std::uint64_t i) {
  std::uint64_t x = call * 0x9E3779B97F4A7C15ULL ^ rank * 0xC2B2AE3D27D4EB4FULL ^ (i + 1);
  x ^= x >> 31;
  x *= 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 29;
  return x;
}

}  // namespace fastdist::test
