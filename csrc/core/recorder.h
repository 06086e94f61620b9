// The last collectives of this process, in a file that other processes read: it tells what a
// process did even if that is stopped, stuck in C or dead, and without asking it.
//
// The file lies in memory (tmpfs). It holds a header, the process's communicators, the lines of
// Python from which calls came, and a ring of calls. A reader may see a half-written entry: its
// number then differs before and after the reading.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "core/noncopyable.h"
#include "core/signature.h"

namespace fastdist::recorder {

template <class Clock>
[[nodiscard]] std::uint64_t now_ns() noexcept {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(Clock::now().time_since_epoch()).count());
}

// Returns the time in units of `FileHeader::clock`: a counter of the processor where that runs
// evenly, which takes a third of the time that clock_gettime takes.
extern const bool has_steady_counter;
[[nodiscard]] inline std::uint64_t ticks() noexcept {
#if defined(__x86_64__)
  if (has_steady_counter) return __rdtsc();
#elif defined(__aarch64__)
  if (has_steady_counter) {
    std::uint64_t now = 0;
    asm volatile("mrs %0, cntvct_el0" : "=r"(now));
    return now;
  }
#endif
  return now_ns<std::chrono::steady_clock>();
}

constexpr std::uint32_t kFormat = 2;
constexpr std::size_t kCalls = 4096;
constexpr std::size_t kCommunicators = 256;
constexpr std::size_t kSites = 512;
constexpr std::size_t kPhases = 8192;
constexpr std::uint16_t kNoSite = 0;

enum class Outcome : std::uint8_t { kRunning, kDone, kFailed };

// What the process does between collectives: a number of recorder/phases.py, below 8.
using Phase = std::uint8_t;

using Word = std::atomic<std::uint64_t>;

struct FileHeader {
  Word magic;  // "fastdist", once the header is written
  std::uint32_t format;
  std::int32_t pid;
  std::uint64_t started;  // of the process, in clock ticks since boot, as in /proc/PID/stat
  std::uint64_t ticks;    // `ticks()` and the clocks of the system at one moment
  std::uint64_t monotonic_ns;
  std::uint64_t realtime_ns;
  std::int32_t rank;
  std::int32_t world_size;
  std::uint64_t clock;  // 1: nanoseconds of CLOCK_MONOTONIC; 0: a counter
  Word calls;           // how many calls have begun
  Word phase;
  Word phase_since;  // ticks
  std::atomic<std::uint32_t> communicators;
  std::atomic<std::uint32_t> sites;
  std::array<char, 32> version;
  std::array<char, 64> job;
  std::array<char, 64> host;
  std::array<char, 256> program;
  Word phases;                // how many have begun
  std::array<char, 32> task;  // "worker 1" of a job with parameter servers; "" for a rank
};
static_assert(sizeof(FileHeader) == 552);

struct RecordedCommunicator {
  std::int32_t rank;  // this process's
  std::int32_t size;
  std::uint64_t key;  // the same on all of its ranks, and on no others
  std::atomic<std::uint32_t> is_open;
  std::array<char, 12> engine;
};
static_assert(sizeof(RecordedCommunicator) == 32);

using Site = std::array<char, 256>;  // "file.py:12 in train"

struct alignas(64) RecordedCall {
  Word number;     // from 1; 0 while the entry is written
  Word entered;    // ticks
  Word there;      // when all ranks had announced the call; 0: not yet, or at once
  Word done;       // 0: not yet; as `entered`: at once, within about a microsecond
  Word signature;  // `Signature::packed`
  Word count;      // elements
  Word sequence;   // of the call in its communicator, from 1; of a send or receive, in its lane
  std::atomic<std::uint16_t> communicator;
  std::atomic<std::uint16_t> site;  // from 1; 0: unknown
  std::uint8_t unused;
  std::atomic<Outcome> outcome;
};
static_assert(sizeof(RecordedCall) == 64);

struct File {
  FileHeader header;
  alignas(4096) std::array<RecordedCommunicator, kCommunicators> communicators;
  alignas(4096) std::array<Site, kSites> sites;
  alignas(4096) std::array<RecordedCall, kCalls> calls;
  // The ring of phases that have begun: phase n, from 0, is `ticks << 3 | phase` at n % kPhases.
  alignas(4096) std::array<Word, kPhases> phases;
};

// This process's file; null where nothing is recorded, and in forked children.
inline std::atomic<File*> file{nullptr};

// Begins to record in a new file at `path`. Throws if that cannot be made. A second start leaves
// the first file and its records where they are. The file is locked (flock) as long as the process
// lives, so that readers in another PID namespace can tell that it is alive.
void start(const std::string& path, int rank, int world_size, const std::string& version,
           const std::string& job, const std::string& host, const std::string& program,
           const std::string& task);
// Says that the process is a rank of another job from now on.
void set_job(int rank, int world_size, const std::string& job) noexcept;
// Returns the number of a communicator in the file; none if there is no place for it.
[[nodiscard]] std::optional<std::uint16_t> open_communicator(int rank, int size, std::uint64_t key,
                                                             const std::string& engine);
void close_communicator(std::uint16_t number) noexcept;
// Returns the number of a site, which is new; kNoSite if there is no place for it.
[[nodiscard]] std::uint16_t add_site(const std::string& text) noexcept;

// Records that the process begins to wait for a parameter server, until `end_request`.
//
// `op`: of ps/wire/protocol.py. Returns 0 where nothing is recorded.
[[nodiscard]] std::uint64_t begin_request(std::uint16_t communicator, int server, unsigned op,
                                          std::uint64_t bytes, std::uint16_t site) noexcept;
void end_request(std::uint64_t number, bool is_answered) noexcept;

// Returns the phase before.
inline Phase set_phase(Phase phase) noexcept {
  File* const f = file.load(std::memory_order_acquire);
  if (f == nullptr) return 0;
  const auto now = ticks();
  const auto before = f->header.phase.exchange(phase);
  f->header.phase_since.store(now, std::memory_order_relaxed);
  const auto place = f->header.phases.load(std::memory_order_relaxed);
  f->phases[place % kPhases].store(now << 3 | phase, std::memory_order_relaxed);
  f->header.phases.store(place + 1, std::memory_order_release);
  return static_cast<Phase>(before);
}

// Goes back to the phase before, unless another thread has begun one meanwhile.
inline void end_phase(Phase phase, Phase before) noexcept {
  File* const f = file.load(std::memory_order_acquire);
  if (f != nullptr && f->header.phase.load() == phase) (void)set_phase(before);
}

// A call that is being recorded. The ring may wrap before the call ends.
class Record : NonCopyable {
 public:
  Record(File& f, std::uint16_t communicator, std::uint64_t sequence, std::uint16_t site) noexcept
      : number_(f.header.calls.fetch_add(1, std::memory_order_relaxed) + 1),
        entered_(ticks()),
        entry_(f.calls[number_ % kCalls]) {
    // Each store after that of the number is a release, so that none can be seen before it.
    constexpr auto kAfter = std::memory_order_release;
    entry_.number.store(0, std::memory_order_relaxed);
    entry_.entered.store(entered_, kAfter);
    entry_.there.store(0, kAfter);
    entry_.done.store(0, kAfter);
    entry_.sequence.store(sequence, kAfter);
    entry_.communicator.store(communicator, kAfter);
    entry_.site.store(site, kAfter);
    entry_.outcome.store(Outcome::kRunning, kAfter);
  }
  ~Record() {
    if (!is_current()) return;
    const bool is_quick = is_quick_ && outcome_ == Outcome::kDone;
    entry_.done.store(is_quick ? entered_ : ticks(), std::memory_order_relaxed);
    entry_.outcome.store(outcome_, std::memory_order_release);
  }
  // Must be called when the call is known; a receive that has waited does again.
  void announce(const Signature& call) noexcept {
    is_quick_ =
        call.count <= kQuick && !call.on_gpu && call.op != Op::kSend && call.op != Op::kRecv;
    entry_.signature.store(call.packed(), std::memory_order_release);
    entry_.count.store(call.count, std::memory_order_release);
    entry_.number.store(number_, std::memory_order_release);
  }
  // All ranks have announced the call.
  void arrive() noexcept {
    is_quick_ = false;
    if (is_current() && entry_.there.load(std::memory_order_relaxed) == 0) {
      entry_.there.store(ticks(), std::memory_order_relaxed);
    }
  }
  void succeed() noexcept { outcome_ = Outcome::kDone; }
  // Detaches: another object will end this call.
  [[nodiscard]] std::uint64_t leave() noexcept { return std::exchange(number_, ~number_); }

 private:
  [[nodiscard]] bool is_current() const noexcept {
    return entry_.number.load(std::memory_order_relaxed) == number_;
  }

  // A collective on host memory that waits for no rank and moves few elements takes about as long
  // as reading the time.
  static constexpr std::uint64_t kQuick = 1024;

  std::uint64_t number_;
  std::uint64_t entered_;
  RecordedCall& entry_;
  bool is_quick_ = false;
  Outcome outcome_ = Outcome::kFailed;
};

}  // namespace fastdist::recorder
