#include "nccl/library.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <string_view>

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

Library open_library(void* handle, const std::string& asked) {
  Library library;
  library.path = path_of(handle, asked);
  abi::Functions& f = library.functions;
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
  if (f.get_version != nullptr && f.get_version(&library.version) == abi::kSuccess) {
    check_version(library.version, library.path);
  }
  if (missing.empty()) return library;
  refuse(ErrorCode::kUnsupported, library.path,
         " is not an NCCL library that fastdist can use: it lacks", missing);
}

// A loaded library has the same handle under all its names (links).
void* find_loaded(std::string& asked) {
  asked = kName;
  if (void* handle = ::dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) return handle;
  const auto look = [](dl_phdr_info* info, std::size_t, void* found) {
    const std::string_view path = info->dlpi_name;
    // Plugins have names such as libnccl-net.so.
    if (!path.substr(path.rfind('/') + 1).starts_with("libnccl.so")) return 0;
    *static_cast<std::string*>(found) = path;
    return 1;
  };
  if (::dl_iterate_phdr(look, &asked) == 0) return nullptr;
  return ::dlopen(asked.c_str(), RTLD_NOW | RTLD_NOLOAD);
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
  // Never unloaded, since communicators may outlive any owner.
  static const Library kept = search(candidates);
  the_library.store(&kept, std::memory_order_release);
  return kept;
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

std::map<std::string, std::string> settings_for_sharing(int version, int process) {
  constexpr int kFirstWithSharing = 23003;
  if (version >= kFirstWithSharing) {
    // NCCL's documentation of this mode advises few channels and no multicast.
    return {{"NCCL_MULTI_RANK_GPU_ENABLE", "1"}, {"NCCL_MAX_CTAS", "8"}, {"NCCL_NVLS_ENABLE", "0"}};
  }
  // NCCL lets ranks with different host ids share a GPU; they communicate through sockets.
  return {{"NCCL_HOSTID", "fastdist-" + std::to_string(process)}};
}

}  // namespace fastdist::nccl
