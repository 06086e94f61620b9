// Which process this is, counted in forks.
#pragma once

namespace fastdist {

// Counts the forks between the first process and this one: what was made under another number
// belongs to an ancestor and must be left alone.
[[nodiscard]] int process_generation() noexcept;

}  // namespace fastdist
