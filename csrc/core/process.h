// Identifies this process by its number of forks.
#pragma once

namespace fastdist {

// Returns the number of forks between the first process and this one. An object created under
// another number belongs to an ancestor process and must not be used.
[[nodiscard]] int process_generation() noexcept;

}  // namespace fastdist
