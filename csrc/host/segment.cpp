#include "host/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "core/error.h"

namespace fastdist::host {

FileDescriptor create_segment_file(std::size_t bytes) {
  FileDescriptor file(::memfd_create("fastdist", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) throw system_error("memfd_create");
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  if (::fcntl(file.get(), F_SETLK, &lock) != 0) throw system_error("locking shared memory");
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    throw system_error("sealing shared memory");
  }
  grow(file, bytes);
  return file;
}

bool is_locked_by_other(const FileDescriptor& file) noexcept {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  if (::fcntl(file.get(), F_GETLK, &lock) != 0) return false;
  return lock.l_type != F_UNLCK;
}

void grow(const FileDescriptor& file, std::size_t bytes) {
  struct stat status{};
  if (::fstat(file.get(), &status) != 0) throw system_error("fstat on shared memory");
  if (static_cast<std::size_t>(status.st_size) >= bytes) return;
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    // Another thread has grown the file meanwhile, and it cannot shrink.
    if (errno == EPERM) return;
    throw system_error("growing shared memory to " + std::to_string(bytes) + " bytes");
  }
}

void discard(const FileDescriptor& file, std::size_t offset, std::size_t bytes) noexcept {
  ::fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
}

Mapping::Mapping(const FileDescriptor& file, std::size_t bytes) : bytes_(bytes) {
  void* data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(), 0);
  if (data == MAP_FAILED) {
    throw Error(ErrorCode::kMemory, "cannot map " + std::to_string(bytes >> 20) +
                                        " MiB of address space for shared memory; is there a "
                                        "limit (ulimit -v)?");
  }
  data_ = static_cast<std::byte*>(data);
  ::madvise(data, bytes, MADV_HUGEPAGE);  // a hint: most kernels ignore it for shared memory
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace fastdist::host
