// Which of the instruction sets that loops are compiled for this processor has.
#pragma once

#include <cstdint>

namespace fastdist {

enum class InstructionSet : std::uint8_t { kGeneric, kAvx2, kAvx512 };

// The widest one.
[[nodiscard]] InstructionSet instruction_set() noexcept;

}  // namespace fastdist
