// csrc/cuda/launch.cuh for virtual GPUs: enqueues kernels on virtual streams. Threads run one after
// another: no kernel's thread waits for others. Before, the memory of the parameters is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/kernels.h"
#include "cuda/stream.h"
#include "virtual_gpu/cuda/work.h"

namespace fastdist::cuda {

inline void check_quanta(const std::byte* data, std::size_t quanta, int device) {
  if (reinterpret_cast<std::uintptr_t>(data) % kQuantumBytes != 0) {
    throw virtual_gpu::Failure(cudaErrorIllegalAddress, "quanta that are not aligned");
  }
  virtual_gpu::check_memory(data, quanta * kQuantumBytes, device);
}

// Throws Failure unless a kernel may use the memory of its table of moves.
template <class Table>
void check_table(const Table& table, int device) {
  for (int i = 0; i < table.count; ++i) {
    const Move& move = table.moves[i];
    virtual_gpu::check_memory(move.array, move.count * size_of(static_cast<DType>(move.dtype)),
                              device);
    const std::size_t bytes = move.count * size_of(table.cast.dtype);
    const std::size_t quanta = (bytes + kQuantumBytes - 1) / kQuantumBytes;
    check_quanta(table.bucket + move.at * kQuantumBytes, quanta, device);
  }
}

template <class Kernel>
void load(Kernel) {}

// Launches on the current device; rejects streams of other devices.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, StreamHandle stream,
            const std::type_identity_t<Parameters>&... arguments) {
  if (blocks == 0) throw std::logic_error("a launch without blocks");
  int device = 0;
  FASTDIST_CUDA_CHECK(cudaGetDevice(&device));
  const auto run = [=] {
    (check_table(arguments, device), ...);
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments...);
    }
  };
  check(virtual_gpu::enqueue(stream, device, run), "launch of a kernel(");
}

}  // namespace fastdist::cuda
