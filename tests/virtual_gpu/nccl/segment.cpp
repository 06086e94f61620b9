#include "virtual_gpu/nccl/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>

namespace virtual_nccl {
namespace {

std::mutex kept_mutex;
std::map<std::string, int>& kept_files() {
  static auto* const kFiles = new std::map<std::string, int>;
  return *kFiles;
}

Shared* map_file(int file) {
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Shared*>(memory);
}

}  // namespace

std::string Segment::create() {
  const int file = ::memfd_create("virtual-nccl", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, sizeof(Shared)) != 0) return "";
  Shared* const shared = map_file(file);
  if (shared == nullptr) return "";
  std::random_device random;
  const std::uint64_t tag = (std::uint64_t{random()} << 32 | random()) | 1;
  shared->tag.store(tag, std::memory_order_release);
  ::munmap(shared, sizeof(Shared));
  std::ostringstream name;
  name << "/proc/" << ::getpid() << "/fd/" << file << " " << tag;
  const std::lock_guard lock(kept_mutex);
  kept_files()[name.str()] = file;
  return name.str();
}

std::shared_ptr<Segment> Segment::open(const std::string& name) {
  std::istringstream words(name);
  std::string path;
  std::uint64_t tag = 0;
  words >> path >> tag;
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  const bool fits = ::lseek(file, 0, SEEK_END) == static_cast<off_t>(sizeof(Shared));
  Shared* const shared = fits ? map_file(file) : nullptr;
  ::close(file);
  if (shared == nullptr) return nullptr;
  std::shared_ptr<Segment> segment(new Segment(shared));
  return shared->tag.load(std::memory_order_acquire) == tag ? segment : nullptr;
}

void Segment::forget(const std::string& name) {
  const std::lock_guard lock(kept_mutex);
  const auto found = kept_files().find(name);
  if (found == kept_files().end()) return;
  ::close(found->second);
  kept_files().erase(found);
}

Segment::~Segment() { ::munmap(shared_, sizeof(Shared)); }

bool wait_until(const std::function<bool()>& is_true, const std::function<bool()>& is_given_up) {
  constexpr int kSpins = 20;
  for (int spin = 0; !is_true(); ++spin) {
    if (is_given_up()) return false;
    if (spin < kSpins) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

}  // namespace virtual_nccl
