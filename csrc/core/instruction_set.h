// The processor's instruction sets that loops are compiled for.
#pragma once

#include <cstdint>

namespace fastdist {

enum class InstructionSet : std::uint8_t { kGeneric, kAvx2, kAvx512 };

// Returns the widest supported instruction set.
[[nodiscard]] InstructionSet instruction_set() noexcept;

}  // namespace fastdist
