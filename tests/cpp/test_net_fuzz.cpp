// What other machines send, changed at random: a call may fail, and nothing else may happen. Every
// run has the same seeds; the sanitizers see what a changed number reaches.

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/failure.h"
#include "net/answers.h"
#include "net/communicator.h"
#include "world.h"

namespace fastdist::test {
namespace {

using net::Connections;
using net::NetCommunicator;
using Bytes = std::vector<std::byte>;

constexpr int kCalls = kSanitized ? 15'000 : 3000;
constexpr int kAnswers = 10'000;
constexpr int kWaits = 32;  // calls that take more than a second, all at once

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::size_t below(std::size_t n) { return engine_() % n; }
  bool one_in(std::size_t n) { return below(n) == 0; }

  // Changes bits, whole numbers, or the length, or nothing.
  void change(Bytes& bytes) {
    for (std::size_t n = below(4); n > 0 && !bytes.empty(); --n) {
      if (one_in(2)) {
        bytes[below(bytes.size())] ^= static_cast<std::byte>(1 << below(8));
        continue;
      }
      static constexpr std::array<std::uint32_t, 10> kEdges{
          0, 1, 2, 3, 127, 255, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
      const std::uint32_t edge = kEdges[below(kEdges.size())];
      const std::size_t at = below(bytes.size()) / sizeof(edge) * sizeof(edge);
      std::memcpy(bytes.data() + at, &edge, std::min(sizeof(edge), bytes.size() - at));
    }
    if (one_in(8)) bytes.resize(below(bytes.size() + 1));
    if (one_in(8)) bytes.resize(bytes.size() + below(2000), static_cast<std::byte>(below(256)));
  }

 private:
  std::mt19937_64 engine_;
};

template <class T>
Bytes bytes_of(const T& object) {
  Bytes bytes(sizeof(T));
  std::memcpy(bytes.data(), &object, sizeof(T));
  return bytes;
}

void append(Bytes& bytes, const Bytes& more) {
  for (const std::byte b : more) bytes.push_back(b);
}

void write_all(const FileDescriptor& fd, const Bytes& bytes) {
  (void)::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// The headers that a peer sends, as communicator.h, lanes.cpp and answers.cpp lay them out.
struct Record {
  std::uint64_t sequence, signature, count, list;
  std::array<std::byte, 464> payload;
};
struct TransferHead {
  std::uint64_t number, signature, count, tag;
};
struct AnswerHead {
  std::uint32_t kind, bytes;
  std::uint64_t number, signature, count;
};

constexpr std::uint32_t kFailureAnswer = 3;
constexpr std::uint32_t kStateAnswer = 5;

Bytes failure(Random& random, const std::string& detail) {
  FailureRecord record{};
  write({.kind = static_cast<FailureKind>(random.below(12)),
         .ranks = {1},
         .noticed_by = static_cast<int>(random.below(2)),
         .detail = detail,
         .code = static_cast<ErrorCode>(random.below(10))},
        record);
  const std::string_view bytes = fastdist::bytes_of(record);
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  return {data, data + bytes.size()};
}

Bytes bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

// What rank 1 says while it waits in the call of rank 0, in one with rank 0, or elsewhere.
Bytes state(Random& random, std::uint64_t signature) {
  net::Waiting waiting{};
  waiting.state = {.head = {random.below(3), signature, 3, 0},
                   .id = random.below(2),
                   .number = static_cast<std::uint32_t>(random.below(3)),
                   .ranks = 2,
                   .is_alone = 1,
                   .is_elsewhere = random.one_in(4) ? 1U : 0U,
                   .awaited = 0,
                   .unused = 0};
  if (random.one_in(2)) {
    waiting.state.head.signature = rooted(random.one_in(2) ? Op::kSend : Op::kRecv, 0).packed();
  }
  waiting.sent = waiting.received = {0, 0};
  if (waiting.state.is_elsewhere != 0) waiting.awaited.resize(random.below(net::kMostAwaited + 2));
  waiting.state.awaited = static_cast<std::uint32_t>(waiting.awaited.size());
  waiting.site = "train.py:7";
  return bytes_of(serialize(waiting));
}

Bytes answer(Random& random, std::uint32_t kind, std::uint64_t signature) {
  const std::string text = "train.py:7";
  AnswerHead head{kind, 0, 1, signature, 3};
  Bytes body = kind == kStateAnswer     ? state(random, signature)
               : kind == kFailureAnswer ? failure(random, text)
                                        : bytes_of(text);
  random.change(body);
  head.bytes = static_cast<std::uint32_t>(body.size());
  Bytes bytes = bytes_of(head);
  append(bytes, body);
  return bytes;
}

// Makes a call of rank 0 while rank 1 is what `seed` says; `ends`: it closes its connections.
// Returns the call's error, if it fails.
std::optional<ErrorCode> call_at_random(std::uint64_t seed, bool ends,
                                        std::chrono::milliseconds timeout) {
  Random random(seed);
  std::array<std::array<FileDescriptor, 3>, 2> sides;  // stream, out, in
  for (std::size_t i = 0; i < 3; ++i) {
    int pair[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    sides[0][i] = FileDescriptor(pair[0]);
    sides[1][i] = FileDescriptor(pair[1]);
  }
  std::vector<Connections> connections(2);
  connections[1] = {std::move(sides[0][1]), std::move(sides[0][2]), std::move(sides[0][0])};
  Ranks inner = make_thread_ranks(1, Tuning{});
  NetCommunicator comm(std::move(inner[0]), 0, {{0, "127.0.0.1"}, {1, "127.0.0.1"}},
                       std::move(connections));

  std::vector<float> x(random.one_in(2) ? 3 : 5000), y(2 * x.size());
  const TensorView in{reinterpret_cast<std::byte*>(x.data()), x.size(), DType::kFloat32, 0};
  const TensorView out{reinterpret_cast<std::byte*>(y.data()), y.size(), DType::kFloat32, 0};
  const std::size_t op = random.below(8);
  const std::array<Signature, 8> calls{
      Signature{.op = Op::kBarrier},
      signature_of({.op = Op::kAllReduce}, {&in, 1}),
      signature_of({.op = Op::kAllGather}, {&in, 1}),
      signature_of(rooted(Op::kBroadcast, 1), {&in, 1}),
      signature_of(rooted(Op::kGather, 0), {&in, 1}),
      signature_of(rooted(Op::kSend, 1), {&in, 1}),
      signature_of(rooted(Op::kRecv, 1), {&in, 1}),
      signature_of(rooted(Op::kRecv, 1), {&in, 1}),
  };
  const Signature& call = calls[op];

  Bytes stream;
  for (int i = 0; i < 3; ++i) {
    Bytes record = bytes_of(Record{1, call.packed(), call.count, call.list, {}});
    random.change(record);
    append(stream, record);
  }
  stream.resize(stream.size() + random.below(60'000), std::byte{65});
  Bytes lane = bytes_of(TransferHead{1, signature_of(rooted(Op::kSend, 0), {&in, 1}).packed(),
                                     x.size(), random.below(3)});
  random.change(lane);
  lane.resize(lane.size() + random.below(40'000), std::byte{66});
  Bytes answers;
  for (std::size_t n = random.below(3) + (ends ? 0 : 1); n > 0; --n) {
    const auto kind = ends ? static_cast<std::uint32_t>(random.below(7)) : kStateAnswer;
    Bytes one = answer(random, kind, call.packed());
    if (ends) random.change(one);
    append(answers, one);
  }
  if (ends) write_all(sides[1][0], stream);
  write_all(sides[1][1], answers);
  if (ends) write_all(sides[1][2], lane);
  for (const FileDescriptor& fd : sides[1]) {
    if (ends) ::shutdown(fd.get(), SHUT_WR);
  }
  const CallOptions options = impatient(timeout);
  try {
    switch (op) {
      case 0:
        comm.barrier(options);
        break;
      case 1:
        comm.all_reduce({&in, 1}, {&in, 1}, ReduceOp::kSum, options);
        break;
      case 2:
        comm.all_gather(in, out, options);
        break;
      case 3:
        comm.broadcast({&in, 1}, 1, options);
        break;
      case 4:
        comm.gather(in, out, 0, options);
        break;
      case 5:
        comm.send(in, 1, options);
        break;
      case 7:
        (void)comm.await_message(1, in, options);
        [[fallthrough]];
      case 6:
        comm.recv(in, 1, options);
    }
  } catch (const Error& error) {
    CHECK(std::strlen(error.what()) > 0);
    for (const int p : error.ranks()) CHECK(p == 0 || p == 1);
    return error.code();
  }
  return std::nullopt;
}

CASE(calls) {
  std::atomic<std::uint64_t> seed{0};
  in_threads(4, [&](int) {
    for (std::uint64_t mine; (mine = seed++) < kCalls;) {
      (void)call_at_random(mine, true, std::chrono::seconds(5));
    }
  });
}

CASE(most_answers_about_deadlocks_can_be_read) {
  Random random(1);
  int read = 0;
  for (int i = 0; i < kAnswers; ++i) {
    const Bytes bytes = answer(random, kStateAnswer, Signature{.op = Op::kBarrier}.packed());
    const auto* text = reinterpret_cast<const char*>(bytes.data());
    if (net::parse({text + sizeof(AnswerHead), text + bytes.size()}, 2)) ++read;
  }
  CHECK_THAT(2 * read > kAnswers, read);
  CHECK_THAT(read < kAnswers, read);
}

// Ranks that wait longer ask each other in which calls they are.
CASE(answers_about_deadlocks) {
  std::atomic<int> deadlocks{0};
  in_threads(kWaits, [&](int r) {
    const auto code =
        call_at_random(static_cast<std::uint64_t>(r), false, std::chrono::milliseconds(1300));
    if (code == ErrorCode::kMismatch) ++deadlocks;
  });
  CHECK_THAT(deadlocks > 0 && deadlocks < kWaits, deadlocks);
}

}  // namespace
}  // namespace fastdist::test
