// Finds libnccl at run time. A library that the process has already loaded is used first, since two
// NCCL libraries in one process would compete for the same GPUs.
#pragma once

#include <map>
#include <span>
#include <string>

#include "nccl/abi.h"

namespace fastdist::nccl {

inline constexpr int kOldestVersion = 22703;

struct Library {
  std::string path;
  int version = 0;  // 10000 · major + 100 · minor + patch
  abi::Functions functions;
};

// Returns the library, which the first load_library call loads permanently, or null.
[[nodiscard]] const Library* loaded_library() noexcept;
// Searches the libraries that the process has loaded, then `candidates`, then the system's paths.
// Throws kUnsupported if no library is found or if it is too old.
const Library& load_library(std::span<const std::string> candidates);

// Throws kUnsupported for a version that is too old.
void check_version(int version, const std::string& path);
// "2.27.3"
[[nodiscard]] std::string version_text(int version);
// Returns the environment variables that must be set before the first communicator is created so
// that ranks can share a GPU. `process` must be unique per process.
[[nodiscard]] std::map<std::string, std::string> settings_for_sharing(int version, int process);

}  // namespace fastdist::nccl
