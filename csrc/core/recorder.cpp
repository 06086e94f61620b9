#include "core/recorder.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "core/error.h"
#include "core/file_descriptor.h"

namespace fastdist::recorder {
namespace {

std::mutex changing;  // guards what is not a call

template <std::size_t kSize>
void put(std::array<char, kSize>& to, const std::string& text) noexcept {
  to.fill('\0');
  text.copy(to.data(), kSize - 1);
}

bool counter_is_steady() noexcept {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & 1U << 8) != 0;
#elif defined(__aarch64__)
  return true;
#else
  return false;
#endif
}

// Returns field 22 of /proc/self/stat: with the id, it names the process for good.
std::uint64_t start_of_process() {
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  std::size_t at = text.rfind(')');  // the name before it may hold anything
  for (int field = 2; field < 22 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  return at == std::string::npos ? 0 : std::strtoull(text.c_str() + at, nullptr, 10);
}

// Throws the text of errno, and removes the file.
[[noreturn]] void throw_without(const std::string& problem, const std::string& path) {
  const Error error = system_error(problem + path);
  ::unlink(path.c_str());
  throw error;
}

// The file, which this process has locked.
int locked = -1;
struct stat locked_status{};

// A child that kept the descriptor would keep the lock.
void unlock_in_child() noexcept {
  file.store(nullptr, std::memory_order_relaxed);
  struct stat now{};
  const bool is_same = ::fstat(locked, &now) == 0 && now.st_ino == locked_status.st_ino &&
                       now.st_dev == locked_status.st_dev;
  if (is_same) ::close(locked);  // the program may have closed it, and opened another
}

File& map(const std::string& path) {
  const FileDescriptor fd(::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (fd.get() < 0) throw system_error("cannot make " + path);
  // Without memory for it, storing to the file would end the process.
  errno = ::posix_fallocate(fd.get(), 0, sizeof(File));
  if (errno != 0) throw_without("no memory for ", path);
  void* const memory =
      ::mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) throw_without("cannot map ", path);
  // Opened again, for children inherit the mapping and what it refers to.
  locked = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ::flock(locked, LOCK_EX);  // fails where a file system has no locks
  ::fstat(locked, &locked_status);
  return *static_cast<File*>(memory);  // of zeros
}

}  // namespace

const bool has_steady_counter = counter_is_steady();

void start(const std::string& path, int rank, int world_size, const std::string& version,
           const std::string& job, const std::string& host, const std::string& program,
           const std::string& task) {
  const std::lock_guard lock(changing);
  if (file.load() != nullptr) return;
  File& made = map(path);
  FileHeader& header = made.header;
  header.pid = ::getpid();
  header.started = start_of_process();
  header.clock = has_steady_counter ? 0 : 1;
  header.ticks = ticks();
  header.monotonic_ns = now_ns<std::chrono::steady_clock>();
  header.realtime_ns = now_ns<std::chrono::system_clock>();
  header.rank = rank;
  header.world_size = world_size;
  put(header.version, version);
  put(header.job, job);
  put(header.host, host);
  put(header.program, program);
  put(header.task, task);
  header.phase_since = header.ticks;
  header.format = kFormat;
  std::uint64_t magic = 0;
  std::memcpy(&magic, "fastdist", sizeof(magic));
  header.magic.store(magic, std::memory_order_release);
  static const int registered = ::pthread_atfork(nullptr, nullptr, unlock_in_child);
  (void)registered;
  file.store(&made, std::memory_order_release);
}

void set_job(int rank, int world_size, const std::string& job) noexcept {
  File* const f = file.load(std::memory_order_acquire);
  if (f == nullptr) return;
  const std::lock_guard lock(changing);
  f->header.rank = rank;
  f->header.world_size = world_size;
  put(f->header.job, job);
}

std::optional<std::uint16_t> open_communicator(int rank, int size, std::uint64_t key,
                                               const std::string& engine) {
  File* const f = file.load(std::memory_order_acquire);
  if (f == nullptr) return std::nullopt;
  const std::lock_guard lock(changing);
  // Places that were never used come first, so that calls in the ring keep their communicators.
  const std::uint32_t used = f->header.communicators.load();
  std::uint32_t number = used;
  if (used == kCommunicators) {
    const auto closed = std::ranges::find_if(
        f->communicators, [](const RecordedCommunicator& each) { return each.is_open == 0; });
    if (closed == f->communicators.end()) return std::nullopt;
    number = static_cast<std::uint32_t>(closed - f->communicators.begin());
    for (RecordedCall& call : f->calls) {  // of the communicator that had the place
      if (call.communicator.load(std::memory_order_relaxed) == number) call.number = 0;
    }
  }
  RecordedCommunicator& made = f->communicators[number];
  made.rank = rank;
  made.size = size;
  made.key = key;
  put(made.engine, engine);
  made.is_open = 1;
  if (number == used) f->header.communicators = used + 1;
  return static_cast<std::uint16_t>(number);
}

void close_communicator(std::uint16_t number) noexcept {
  File* const f = file.load(std::memory_order_acquire);
  if (f != nullptr) f->communicators[number].is_open = 0;
}

std::uint16_t add_site(const std::string& text) noexcept {
  File* const f = file.load(std::memory_order_acquire);
  if (f == nullptr) return kNoSite;
  const std::lock_guard lock(changing);
  const std::uint32_t number = f->header.sites.load();
  if (number == kSites) return kNoSite;
  put(f->sites[number], text);
  f->header.sites = number + 1;
  return static_cast<std::uint16_t>(number + 1);
}

std::uint64_t begin_request(std::uint16_t communicator, int server, unsigned op,
                            std::uint64_t bytes, std::uint16_t site) noexcept {
  constexpr unsigned kFirst = 64;  // after those of collectives
  File* const f = file.load(std::memory_order_acquire);
  if (f == nullptr) return 0;
  Record record(*f, communicator, 0, site);
  Signature request = rooted(static_cast<Op>(kFirst + op), server);
  request.count = bytes;
  record.announce(request);
  return record.leave();
}

void end_request(std::uint64_t number, bool is_answered) noexcept {
  File* const f = file.load(std::memory_order_acquire);
  if (f == nullptr || number == 0) return;
  RecordedCall& entry = f->calls[number % kCalls];
  if (entry.number.load(std::memory_order_relaxed) != number) return;
  entry.done.store(ticks(), std::memory_order_relaxed);
  entry.outcome.store(is_answered ? Outcome::kDone : Outcome::kFailed, std::memory_order_release);
}

}  // namespace fastdist::recorder
