// The kernel of cuda/peer_memory.h for virtual GPUs: blocks of threads run one after another, in
// the same order on every rank.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "cuda/check.h"
#include "cuda/peer_memory.h"
#include "host/kernels.h"
#include "virtual_gpu/cuda/work.h"

namespace fastdist::cuda {
namespace {

constexpr std::size_t kQuantum = 16;

bool is_given_up(const PeerCall& call) {
  return std::atomic_ref(*const_cast<int*>(call.is_given_up)).load() != 0;
}

// Returns false if the call was given up.
[[nodiscard]] bool meet(const PeerCall& call, std::size_t block, int step) {
  PeerPage::Block& own = call.pages[call.rank]->blocks[block];
  const std::uint32_t number = own.steps[step] + 1;
  for (int p = 0; p < call.size; ++p) {
    auto& signal = call.pages[p]->blocks[block].signals[step][call.rank];
    std::atomic_ref(signal).store(number, std::memory_order_release);
  }
  for (int p = 0; p < call.size; ++p) {
    auto& signal = own.signals[step][p];
    while (static_cast<int>(std::atomic_ref(signal).load(std::memory_order_acquire) - number) < 0) {
      if (is_given_up(call)) return false;
      std::this_thread::yield();
    }
  }
  own.steps[step] = number;
  return true;
}

void run_block(DType dtype, const PeerCall& call, std::size_t block, std::size_t blocks) {
  const std::size_t item = size_of(dtype);
  const std::size_t bytes = call.count * item;
  const std::size_t all = (bytes + kQuantum - 1) / kQuantum;
  const std::size_t each = (all + blocks - 1) / blocks * kQuantum;
  const std::size_t begin = std::min(bytes, block * each);
  const std::size_t size = std::min(bytes, begin + each) - begin;
  if (size > kPeerChunkBytes) throw std::logic_error("a part that is larger than its chunk");
  if (is_given_up(call)) return;
  PeerPage& page = *call.pages[call.rank];
  const std::uint32_t parity = page.blocks[block].steps[0] % 2;
  std::memcpy(page.inputs[block][parity].bytes, call.in + begin, size);
  if (!meet(call, block, 0)) return;
  const ReduceOp op = call.factor == 1.0F ? ReduceOp::kSum : ReduceOp::kMean;
  const auto sum = [&](std::byte* to, std::size_t from, std::size_t length) {
    std::vector<const std::byte*> sources;
    for (int p = 0; p < call.size; ++p) {
      sources.push_back(call.pages[p]->inputs[block][parity].bytes + from);
    }
    host::reduce(dtype, op, to, nullptr, sources, length / item);
  };
  if (!call.in_two_shots) return sum(call.out + begin, 0, size);
  const std::size_t quanta = (size + kQuantum - 1) / kQuantum;
  const auto n = static_cast<std::size_t>(call.size);
  const std::size_t share = (quanta + n - 1) / n * kQuantum;
  const auto part = [&](std::size_t p) {
    return std::pair(std::min(size, p * share), std::min(size, (p + 1) * share));
  };
  const auto [first, last] = part(static_cast<std::size_t>(call.rank));
  sum(page.results[block][parity].bytes + first, first, last - first);
  if (!meet(call, block, 1)) return;
  for (std::size_t p = 0; p < n; ++p) {
    const auto [from, to] = part(p);
    std::memcpy(call.out + begin + from, call.pages[p]->results[block][parity].bytes + from,
                to - from);
  }
}

}  // namespace

void load_peer_kernels() {}

void reduce_with_peers(DType dtype, const PeerCall& call, int blocks, StreamHandle stream) {
  int device = 0;
  FASTDIST_CUDA_CHECK(cudaGetDevice(&device));
  const auto run = [dtype, call, blocks, device] {
    virtual_gpu::check_memory(call.in, call.count * size_of(dtype), device);
    virtual_gpu::check_memory(call.out, call.count * size_of(dtype), device);
    virtual_gpu::check_memory(call.pages[call.rank], sizeof(PeerPage), device);
    for (int block = 0; block < blocks; ++block) {
      run_block(dtype, call, static_cast<std::size_t>(block), static_cast<std::size_t>(blocks));
    }
  };
  check(virtual_gpu::enqueue(stream, device, run), "launch of a kernel(");
}

}  // namespace fastdist::cuda
