// Runs the threads of a block on one thread of the CPU.
//
// A thread runs until it waits for the others or ends, and the next one follows. A thread that
// waits keeps its stack; as long as none does, all run on one stack.
#pragma once

#include <cstdint>
#include <functional>

#include "virtual_gpu/cuda/work.h"

namespace virtual_gpu {

struct Index {
  unsigned x;
};
extern thread_local Index threadIdx, blockIdx, gridDim;

// Runs `body` once for each thread, with its number in `threadIdx`.
void run_block(unsigned threads, const std::function<void()>& body);

// For `body`. Waits until all threads that have not ended come here too.
void await_block();
// Returns the value of the thread whose number differs in the bits `lanes`. All threads that have
// not ended must call, also those of other warps, which real GPUs do not need.
[[nodiscard]] std::uint32_t exchange(std::uint32_t value, unsigned lanes);

}  // namespace virtual_gpu
