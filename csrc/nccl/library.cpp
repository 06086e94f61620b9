#include "nccl/library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/error.h"

namespace fastdist::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";

std::atomic<const Library*> the_library{nullptr};

std::string path_of(void* handle, const std::string& asked) {
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0') return map->l_name;
  return asked;
}

template <class Function>
void find(void* handle, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, symbol));
}

abi::Functions find_functions(void* handle, const std::string& path) {
  abi::Functions f;
  std::string missing;
#define FASTDIST_NCCL_FIND_REQUIRED(name, symbol, parameters) \
  find(handle, #symbol, f.name);                              \
  if (f.name == nullptr) missing += " " #symbol;
#define FASTDIST_NCCL_FIND_OPTIONAL(name, symbol, parameters) find(handle, #symbol, f.name);
  FASTDIST_NCCL_FUNCTIONS(FASTDIST_NCCL_FIND_REQUIRED, FASTDIST_NCCL_FIND_OPTIONAL)
#undef FASTDIST_NCCL_FIND_REQUIRED
#undef FASTDIST_NCCL_FIND_OPTIONAL
  find(handle, "ncclGetErrorString", f.error_text);
  find(handle, "ncclGetLastError", f.last_error_text);
  if (f.error_text == nullptr) missing += " ncclGetErrorString";
  if (f.last_error_text == nullptr) missing += " ncclGetLastError";
  // An old library lacks some functions; its version is a better message than their names.
  if (f.get_version != nullptr) {
    int version = 0;
    if (f.get_version(&version) == abi::kSuccess) check_version(version, path);
  }
  if (missing.empty()) return f;
  refuse(ErrorCode::kUnsupported, path, " is not an NCCL library that fastdist can use: it lacks",
         missing);
}

Library open_library(void* handle, const std::string& asked) {
  Library library;
  library.path = path_of(handle, asked);
  library.functions = find_functions(handle, library.path);
  (void)library.functions.get_version(&library.version);
  return library;
}

// A loaded library has the same handle under all its names (links).
void* find_loaded(std::string& asked) {
  asked = kName;
  if (void* handle = ::dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) return handle;
  std::stringstream maps;
  maps << std::ifstream("/proc/self/maps").rdbuf();
  for (const std::string& path : libraries_in(maps.str())) {
    asked = path;
    if (void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD)) return handle;
  }
  return nullptr;
}

Library search(std::span<const std::string> candidates) {
  std::string asked;
  if (void* handle = find_loaded(asked)) return open_library(handle, asked);
  std::string tried;
  const auto open = [&](const std::string& path) {
    void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) tried += "\n  " + std::string(::dlerror());
    return handle;
  };
  for (const std::string& path : candidates) {
    if (void* handle = open(path)) return open_library(handle, path);
  }
  if (void* handle = open(kName)) return open_library(handle, kName);
  refuse(ErrorCode::kUnsupported,
         "NCCL was not found; install it with `pip install nvidia-nccl-cu13` (or "
         "nvidia-nccl-cu12, to match the CUDA version of torch).\nTried:",
         tried);
}

}  // namespace

const Library* loaded_library() noexcept { return the_library.load(std::memory_order_acquire); }

const Library& load_library(std::span<const std::string> candidates) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (const Library* library = loaded_library()) return *library;
  // Never unloaded, since communicators may outlive any owner.
  static std::optional<Library> kept;
  kept.emplace(search(candidates));
  the_library.store(&*kept, std::memory_order_release);
  return *kept;
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void check_version(int version, const std::string& path) {
  if (version >= kOldestVersion) return;
  // Versions up to 2.8 had one digit fewer.
  const std::string got = version >= 10000 ? version_text(version) : "2.8 or older";
  refuse(ErrorCode::kUnsupported, "fastdist needs NCCL ", version_text(kOldestVersion),
         " or newer, got ", got, " (", path,
         "); update torch, or the package nvidia-nccl-cu12 or "
         "nvidia-nccl-cu13 that it uses");
}

std::vector<std::string> libraries_in(const std::string& maps) {
  std::vector<std::string> paths;
  std::istringstream lines(maps);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t begin = line.find('/');
    if (begin == std::string::npos) continue;
    std::string path = line.substr(begin);
    const std::string_view name = std::string_view(path).substr(path.rfind('/') + 1);
    // Plugins have names such as libnccl-net.so.
    if (!name.starts_with("libnccl.so")) continue;
    if (std::find(paths.begin(), paths.end(), path) == paths.end()) {
      paths.push_back(std::move(path));
    }
  }
  return paths;
}

std::vector<Setting> settings_for_sharing(int version, int process) {
  constexpr int kFirstWithSharing = 23003;
  if (version >= kFirstWithSharing) {
    // NCCL's documentation of this mode advises few channels and no multicast.
    return {{"NCCL_MULTI_RANK_GPU_ENABLE", "1"}, {"NCCL_MAX_CTAS", "8"}, {"NCCL_NVLS_ENABLE", "0"}};
  }
  // NCCL lets ranks with different host ids share a GPU; they communicate through sockets.
  return {{"NCCL_HOSTID", "fastdist-" + std::to_string(process)}};
}

}  // namespace fastdist::nccl
