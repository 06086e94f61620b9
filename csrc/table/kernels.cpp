#include "table/kernels.h"

#include "core/instruction_set.h"

namespace fastdist::table {
namespace {

const Kernels& pick() {
#if defined(__x86_64__)
  const InstructionSet best = instruction_set();
  if (best == InstructionSet::kAvx512) return avx512::kKernels;
  if (best == InstructionSet::kAvx2) return avx2::kKernels;
#endif
  return generic::kKernels;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& picked = pick();
  return picked;
}

}  // namespace fastdist::table
