#include "cuda/devices.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstdio>
#include <limits>

#include "cuda/check.h"

namespace fastdist::cuda {
namespace {

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    std::array<char, 4> byte{};
    std::snprintf(byte.data(), byte.size(), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += byte.data();
  }
  return text;
}

std::string pci_text(const cudaDeviceProp& properties) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%04x:%02x:%02x", properties.pciDomainID,
                properties.pciBusID, properties.pciDeviceID);
  return text.data();
}

}  // namespace

bool is_built() noexcept { return true; }

int runtime_version() noexcept {
  int version = 0;
  (void)cudaRuntimeGetVersion(&version);
  return version;
}

std::string why_unusable() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (error != cudaSuccess) return explain(error, "");
  return count > 0 ? "" : explain(cudaErrorNoDevice, "");
}

std::size_t free_bytes() noexcept {
  std::size_t free = 0;
  std::size_t all = 0;
  if (cudaMemGetInfo(&free, &all) == cudaSuccess) return free;
  (void)cudaGetLastError();
  return std::numeric_limits<std::size_t>::max();
}

std::vector<DeviceFacts> devices() {
  std::vector<DeviceFacts> all;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  (void)cudaGetLastError();
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    FASTDIST_CUDA_CHECK(cudaGetDeviceProperties(&properties, i));
    all.push_back({properties.name, uuid_text(properties.uuid), pci_text(properties),
                   properties.major, properties.minor, properties.multiProcessorCount,
                   properties.totalGlobalMem});
  }
  return all;
}

}  // namespace fastdist::cuda
