// The kernels of peer_memory.h.

#include <string>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/formats.cuh"
#include "cuda/launch.cuh"
#include "cuda/peer_memory.h"

namespace fastdist::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::uint32_t kQuantum = 16;
// Looks at a signal per look at the host's flag. A look at a signal takes under a microsecond, but
// reads of the host's memory by many threads are served one after another.
constexpr unsigned kLooksAtHost = 4096;

template <class T>
struct alignas(kQuantum) Quantum {
  static constexpr std::uint32_t kEach = kQuantum / sizeof(T);
  T values[kEach];
};

// Waits until this block has reached a step on every rank as often as on this one. What the ranks
// wrote before is then visible. Returns false to all threads if the call was given up.
__device__ bool wait_for_all(const PeerCall& call, int step) {
  __shared__ bool is_given_up;
  PeerPage::Block& own = call.pages[call.rank]->blocks[blockIdx.x];
  const std::uint32_t number = own.steps[step] + 1;  // written below, after all have read it
  if (threadIdx.x == 0) is_given_up = false;
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < call.size) {
    store_release(&call.pages[threadIdx.x]->blocks[blockIdx.x].signals[step][call.rank], number);
    const std::uint32_t* signal = &own.signals[step][threadIdx.x];
    // A rank may be ahead; numbers wrap around.
    for (unsigned looks = 1; static_cast<int>(load_acquire(signal) - number) < 0; ++looks) {
      if (looks % kLooksAtHost == 0 && *call.is_given_up != 0) {
        *call.is_over = 1;
        is_given_up = true;
        break;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) own.steps[step] = number;
  return !is_given_up;
}

// The elements of a call that this block works on. `first` is at a multiple of 16 bytes.
struct Part {
  std::uint32_t first;
  std::uint32_t count;
  std::uint32_t quanta;
};

template <class T>
__device__ Part own_part(const PeerCall& call) {
  constexpr std::uint32_t kEach = Quantum<T>::kEach;
  const std::uint32_t all = (call.count + kEach - 1) / kEach;
  const std::uint32_t each = (all + gridDim.x - 1) / gridDim.x;
  const std::uint32_t begin = min(all, blockIdx.x * each);
  const std::uint32_t end = min(all, begin + each);
  const std::uint32_t first = begin * kEach;
  return {first, min(call.count, end * kEach) - min(call.count, first), end - begin};
}

__device__ bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kQuantum == 0;
}

template <class T>
__device__ Quantum<T> load(const T* array, std::uint32_t quantum, std::uint32_t count) {
  constexpr std::uint32_t kEach = Quantum<T>::kEach;
  const T* from = array + quantum * kEach;
  if (is_aligned(from) && (quantum + 1) * kEach <= count) {
    return *reinterpret_cast<const Quantum<T>*>(from);
  }
  Quantum<T> result{};
#pragma unroll
  for (std::uint32_t i = 0; i < kEach; ++i) {
    if (quantum * kEach + i < count) result.values[i] = from[i];
  }
  return result;
}

template <class T>
__device__ void store(T* array, std::uint32_t quantum, std::uint32_t count,
                      const Quantum<T>& values) {
  constexpr std::uint32_t kEach = Quantum<T>::kEach;
  T* to = array + quantum * kEach;
  if (is_aligned(to) && (quantum + 1) * kEach <= count) {
    *reinterpret_cast<Quantum<T>*>(to) = values;
    return;
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kEach; ++i) {
    if (quantum * kEach + i < count) to[i] = values.values[i];
  }
}

template <class T>
__device__ Quantum<T> sum_of(const PeerCall& call, std::uint32_t parity, std::uint32_t quantum) {
  constexpr std::uint32_t kEach = Quantum<T>::kEach;
  float sums[kEach];
#pragma unroll
  for (std::uint32_t i = 0; i < kEach; ++i) sums[i] = 0.0F;
  for (int p = 0; p < call.size; ++p) {
    const auto* chunk =
        reinterpret_cast<const Quantum<T>*>(&call.pages[p]->inputs[blockIdx.x][parity]);
    const Quantum<T> values = chunk[quantum];
#pragma unroll
    for (std::uint32_t i = 0; i < kEach; ++i) {
      sums[i] = p == 0 ? to_float(values.values[i]) : sums[i] + to_float(values.values[i]);
    }
  }
  Quantum<T> result;
#pragma unroll
  for (std::uint32_t i = 0; i < kEach; ++i) {
    result.values[i] = from_float<T>(sums[i] * call.factor);
  }
  return result;
}

template <class T>
__global__ void __launch_bounds__(kThreads) peer_kernel(const PeerCall __grid_constant__ call) {
  if (*call.is_over != 0) return;  // other ranks may use what this kernel would write
  PeerPage& page = *call.pages[call.rank];
  const std::uint32_t parity = page.blocks[blockIdx.x].steps[0] % 2;
  const Part part = own_part<T>(call);
  const T* in = reinterpret_cast<const T*>(call.in) + part.first;
  T* out = reinterpret_cast<T*>(call.out) + part.first;
  auto* const inputs = reinterpret_cast<Quantum<T>*>(&page.inputs[blockIdx.x][parity]);
  for (std::uint32_t q = threadIdx.x; q < part.quanta; q += kThreads) {
    inputs[q] = load(in, q, part.count);
  }
  if (!wait_for_all(call, 0)) return;
  if (!call.in_two_shots) {
    for (std::uint32_t q = threadIdx.x; q < part.quanta; q += kThreads) {
      store(out, q, part.count, sum_of<T>(call, parity, q));
    }
    return;
  }
  const std::uint32_t share = (part.quanta + call.size - 1) / call.size;
  auto* const results = reinterpret_cast<Quantum<T>*>(&page.results[blockIdx.x][parity]);
  const std::uint32_t begin = min(part.quanta, call.rank * share);
  const std::uint32_t end = min(part.quanta, begin + share);
  for (std::uint32_t q = begin + threadIdx.x; q < end; q += kThreads) {
    results[q] = sum_of<T>(call, parity, q);
  }
  if (!wait_for_all(call, 1)) return;
  for (std::uint32_t q = threadIdx.x; q < part.quanta; q += kThreads) {
    const auto* theirs =
        reinterpret_cast<const Quantum<T>*>(&call.pages[q / share]->results[blockIdx.x][parity]);
    store(out, q, part.count, theirs[q]);
  }
}

template <class T>
void reduce(const PeerCall& call, int blocks, StreamHandle stream) {
  launch(peer_kernel<T>, static_cast<unsigned>(blocks), kThreads, stream, call);
}

}  // namespace

void load_peer_kernels() {
  load(peer_kernel<float>);
  load(peer_kernel<__half>);
  load(peer_kernel<__nv_bfloat16>);
}

void reduce_with_peers(DType dtype, const PeerCall& call, int blocks, StreamHandle stream) {
  if (dtype == DType::kFloat32) return reduce<float>(call, blocks, stream);
  if (dtype == DType::kFloat16) return reduce<__half>(call, blocks, stream);
  reduce<__nv_bfloat16>(call, blocks, stream);
}

}  // namespace fastdist::cuda
