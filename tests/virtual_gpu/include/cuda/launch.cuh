// csrc/cuda/launch.cuh for virtual GPUs: enqueues kernels on virtual streams. Blocks run one after
// another, in the same order on every rank. Before, the memory of the parameters is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/kernels.h"
#include "cuda/stream.h"
#include "virtual_gpu/cuda/block.h"
#include "virtual_gpu/cuda/work.h"

namespace fastdist::cuda {

inline void check_quanta(const std::byte* data, std::size_t quanta, int device) {
  if (reinterpret_cast<std::uintptr_t>(data) % kQuantumBytes != 0) {
    throw virtual_gpu::Failure(cudaErrorIllegalAddress, "quanta that are not aligned");
  }
  virtual_gpu::check_memory(data, quanta * kQuantumBytes, device);
}

// Throws Failure unless a kernel may use the memory of its parameter: a table of moves, or the
// blocks of a reduction.
template <class Parameter>
void check_parameter(const Parameter& p, int device) {
  if constexpr (requires { p.moves; }) {
    for (int i = 0; i < p.count; ++i) {
      const Move& move = p.moves[i];
      virtual_gpu::check_memory(move.array, move.count * size_of(static_cast<DType>(move.dtype)),
                                device);
      const std::size_t bytes = move.count * size_of(p.cast.dtype);
      const std::size_t quanta = (bytes + kQuantumBytes - 1) / kQuantumBytes;
      if (p.bucket != nullptr) check_quanta(p.bucket + move.at * kQuantumBytes, quanta, device);
      for (const float* const per_array :
           {p.cast.magnitudes, const_cast<const float*>(p.measured)}) {
        if (per_array == nullptr) continue;
        virtual_gpu::check_memory(per_array + move.index, sizeof(float), device);
      }
    }
  } else if constexpr (requires { p.stride; }) {
    for (int k = 0; k < p.count; ++k) {
      check_quanta(p.first + static_cast<std::size_t>(k) * p.stride, p.bytes / kQuantumBytes,
                   device);
    }
    check_quanta(p.out, p.bytes / kQuantumBytes, device);
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
    (check_parameter(arguments, device), ...);
    virtual_gpu::gridDim.x = blocks;
    for (unsigned block = 0; block < blocks; ++block) {
      virtual_gpu::blockIdx.x = block;
      virtual_gpu::run_block(threads, [&] { kernel(arguments...); });
    }
  };
  check(virtual_gpu::enqueue(stream, device, run), "launch of a kernel(");
}

}  // namespace fastdist::cuda
