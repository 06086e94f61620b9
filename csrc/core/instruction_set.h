// The processor's instruction sets that loops are compiled for.
#pragma once

#include <cstdint>

namespace fastdist {

enum class InstructionSet : std::uint8_t { kGeneric, kAvx2, kAvx512 };

[[nodiscard]] inline InstructionSet instruction_set() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return InstructionSet::kAvx2;
  }
#endif
  return InstructionSet::kGeneric;
}

}  // namespace fastdist
