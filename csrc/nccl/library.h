// libnccl, found at run time. The one that the process has loaded already is taken first: two of
// them in one process would fight over the same GPUs.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "nccl/abi.h"

namespace fastdist::nccl {

inline constexpr int kOldestVersion = 22703;

struct Library {
  std::string path;
  int version = 0;  // 10000 · major + 100 · minor + patch
  // Optional functions that it has, by NCCL's names.
  std::vector<std::string> has;
  // Further libraries of NCCL in this process, which are left alone.
  std::vector<std::string> others;
  abi::Functions functions;
};

// The library, loaded by the first call and kept for good; null: none was loaded yet.
[[nodiscard]] const Library* loaded_library() noexcept;
// Looks among what the process has loaded, then at `candidates`, then where the system looks.
// Throws kUnsupported where there is none, or an older one than fastdist works with.
const Library& load_library(std::span<const std::string> candidates);

// Throws kUnsupported for a version that is too old.
void check_version(int version, const std::string& path);
// "2.27.3"
[[nodiscard]] std::string version_text(int version);
// Libraries of NCCL among the lines of /proc/self/maps, each once, in order.
[[nodiscard]] std::vector<std::string> libraries_in(const std::string& maps);

// What the environment must hold before the first communicator is made so that ranks may share a
// GPU, for this version of NCCL; `rank` is this process's.
struct Setting {
  std::string name;
  std::string value;
};
[[nodiscard]] std::vector<Setting> settings_for_sharing(int version, int process);

}  // namespace fastdist::nccl
