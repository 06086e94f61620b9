// The line of Python that called fastdist.
#pragma once

#include <cstdint>
#include <string>

namespace fastdist::bindings {

// Returns "file.py:12 in train" for the innermost frame outside fastdist and torch; "" if all
// frames are fastdist's, and the innermost frame in torch if the others are torch's. Needs the GIL.
[[nodiscard]] std::string python_location();

// Returns the number of that line in the recorder's file, in a few nanoseconds where it is known;
// kNoSite where nothing is recorded. Needs the GIL.
[[nodiscard]] std::uint16_t python_site() noexcept;

}  // namespace fastdist::bindings
