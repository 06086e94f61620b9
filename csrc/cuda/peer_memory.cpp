#include "cuda/peer_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "core/error.h"
#include "cuda/check.h"

namespace fastdist::cuda {
namespace {

// Two shots move fewer bytes over each GPU's links, but exchange signals twice. They are used above
// both of these limits.
constexpr std::size_t kMostInOneShot = std::size_t{256} << 10;
constexpr int kFewRanks = 4;
constexpr std::size_t kQuantum = 16;

struct Address {
  std::uint64_t process;
  int device;
  PeerPage* page;  // in that process
  cudaIpcMemHandle_t handle;
};

// Returns a number unique to this process, unlike a process id, which containers may share.
std::uint64_t this_process() {
  static const std::uint64_t number = [] {
    std::random_device random;
    return static_cast<std::uint64_t>(random()) << 32 | random();
  }();
  return number;
}

// The memory of destroyed objects, by device. It is reused, not freed, since other processes may
// have it mapped for a moment longer.
std::mutex left_mutex;
std::multimap<int, std::unique_ptr<DeviceBuffer>>& left() {
  static auto& all = *new std::multimap<int, std::unique_ptr<DeviceBuffer>>;  // outlives CUDA
  return all;
}

constexpr std::size_t kPagesBytes = 2 * sizeof(PeerPage);
constexpr std::size_t kBytes = kPagesBytes + sizeof(int);

std::unique_ptr<DeviceBuffer> take_pages(int device) {
  const std::lock_guard lock(left_mutex);
  const auto found = left().find(device);
  if (found == left().end()) return std::make_unique<DeviceBuffer>(kBytes);
  auto pages = std::move(found->second);
  left().erase(found);
  return pages;
}

Address parse(const std::string& text) {
  Address result{};
  if (text.size() != sizeof(result)) {
    throw Error(ErrorCode::kValue, "a rank's memory has no address");
  }
  std::memcpy(&result, text.data(), sizeof(result));
  return result;
}

}  // namespace

PeerMemory::PeerMemory(int rank) : rank_(rank) {
  const RelaxedCapture relaxed;  // another thread may capture one of its streams
  FASTDIST_CUDA_CHECK(cudaGetDevice(&device_));
  own_ = take_pages(device_);
  is_over_ = reinterpret_cast<int*>(own_->data() + kPagesBytes);
  load_peer_kernels();
  const Stream stream;
  FASTDIST_CUDA_CHECK(cudaMemsetAsync(own_->data(), 0, kBytes, stream.get()));
  FASTDIST_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
  void* flag = nullptr;
  FASTDIST_CUDA_CHECK(cudaHostAlloc(&flag, sizeof(int), cudaHostAllocMapped));
  is_given_up_ = static_cast<int*>(flag);
  *is_given_up_ = 0;
}

PeerMemory::~PeerMemory() {
  if (is_in_use_) {  // all of it must stay until the process ends
    give_up();
    (void)own_.release();
    return;
  }
  try {
    const DeviceGuard guard(device_);
    const RelaxedCapture relaxed;
    for (std::size_t p = 0; p < pages_.size(); ++p) {
      if (is_mapped_[p]) (void)cudaIpcCloseMemHandle(pages_[p]);
    }
    if (is_given_up_ != nullptr) (void)cudaFreeHost(is_given_up_);
    const std::lock_guard lock(left_mutex);
    left().emplace(device_, std::move(own_));
  } catch (...) {  // the process is exiting, and the driver is gone
    (void)own_.release();
  }
}

std::string PeerMemory::address() const {
  Address result{};
  result.process = this_process();
  result.device = device_;
  result.page = reinterpret_cast<PeerPage*>(own_->data());
  FASTDIST_CUDA_CHECK(cudaIpcGetMemHandle(&result.handle, own_->data()));
  return {reinterpret_cast<const char*>(&result), sizeof(result)};
}

void PeerMemory::open(std::span<const std::string> addresses) {
  size_ = static_cast<int>(addresses.size());
  if (size_ > kMostPeers) throw Error(ErrorCode::kUnsupported, "too many ranks");
  for (std::size_t p = 0; p < addresses.size(); ++p) {
    const Address address = parse(addresses[p]);
    if (static_cast<int>(p) == rank_) {
      pages_[p] = reinterpret_cast<PeerPage*>(own_->data());
    } else if (address.process == this_process()) {
      const cudaError_t error = cudaDeviceEnablePeerAccess(address.device, 0);
      (void)cudaGetLastError();
      if (error != cudaErrorPeerAccessAlreadyEnabled) check(error, "cudaDeviceEnablePeerAccess(");
      pages_[p] = address.page;
    } else {
      void* page = nullptr;
      FASTDIST_CUDA_CHECK(
          cudaIpcOpenMemHandle(&page, address.handle, cudaIpcMemLazyEnablePeerAccess));
      pages_[p] = static_cast<PeerPage*>(page);
      is_mapped_[p] = true;
    }
  }
}

bool PeerMemory::can_reduce(const TensorView& array, ReduceOp op) noexcept {
  const bool has_kernel = array.dtype == DType::kFloat32 || array.dtype == DType::kFloat16 ||
                          array.dtype == DType::kBFloat16;
  return has_kernel && (op == ReduceOp::kSum || op == ReduceOp::kMean) &&
         array.bytes() <= kMostPeerBytes;
}

void PeerMemory::all_reduce(const TensorView& in, const TensorView& out, ReduceOp op,
                            StreamHandle stream, bool is_captured) {
  constexpr std::size_t kOfBlock = 64;  // quanta per block, while there are enough blocks
  const std::size_t quanta = (in.bytes() + kQuantum - 1) / kQuantum;
  const std::size_t blocks = std::min<std::size_t>(kPeerBlocks, (quanta + kOfBlock - 1) / kOfBlock);
  PeerCall call{.pages = {},
                .is_over = is_over_,
                .is_given_up = is_given_up_,
                .rank = rank_,
                .size = size_,
                .in = in.data,
                .out = out.data,
                .count = static_cast<std::uint32_t>(in.count),
                .factor = op == ReduceOp::kMean ? 1.0F / static_cast<float>(size_) : 1.0F,
                .in_two_shots = size_ > kFewRanks && in.bytes() > kMostInOneShot};
  for (int p = 0; p < size_; ++p) {
    call.pages[p] = pages_[static_cast<std::size_t>(p)] + (is_captured ? 1 : 0);
  }
  reduce_with_peers(in.dtype, call, static_cast<int>(blocks), stream);
}

void PeerMemory::leave() {
  constexpr std::chrono::seconds kMost{1};
  const Stream stream;
  const Event end;
  const TensorView unused{pages_[static_cast<std::size_t>(rank_)]->results[0][0].bytes, 1,
                          DType::kFloat32, 0};
  all_reduce(unused, unused, ReduceOp::kSum, stream.get(), false);
  end.record(stream.get());
  const auto start = std::chrono::steady_clock::now();
  while (!end.is_done() && std::chrono::steady_clock::now() - start < kMost) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  is_in_use_ = !end.is_done();
  give_up();
  end.synchronize();
}

void PeerMemory::give_up() noexcept { std::atomic_ref(*is_given_up_).store(1); }

}  // namespace fastdist::cuda
