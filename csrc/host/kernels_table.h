// The functions that each instruction set provides; kernels.h describes them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/noncopyable.h"
#include "core/types.h"

namespace fastdist::host {

// One, two or four sources that are reduced by the complete tree over them, and how many reductions
// follow; each takes the last two results.
struct Group {
  std::uint8_t sources;
  std::uint8_t reductions;
};
struct Tree {
  const Group* groups;
  std::size_t n_groups;
  std::size_t n_sources;
  std::size_t divisor;  // of means
};

// The groups of the tree over n sources or, with `after`, of the one in which as many reductions
// follow each source. Means are divided by `divisor` or, if it is 0, by n.
class Groups : NonCopyable {
 public:
  explicit Groups(std::size_t n, std::span<const std::uint8_t> after = {}, std::size_t divisor = 0);
  [[nodiscard]] Tree tree() const noexcept { return tree_; }

 private:
  static constexpr std::size_t kUsual = 64;
  std::array<Group, kUsual> usual_;
  std::vector<Group> many_;
  Tree tree_;
};

// `also` receives a copy of dst; it may be null.
using ReduceFunction = void (*)(std::byte* dst, std::byte* also, const std::byte* const* sources,
                                const Tree& tree, std::size_t count);

struct Kernels {
  std::string_view name;
  const ReduceFunction* const* reductions;  // by dtype and operation; null if not defined
  void (*copy)(std::byte* dst, const std::byte* src, std::size_t bytes);
  void (*copy_past_caches)(std::byte* dst, const std::byte* src, std::size_t bytes);
  void (*convert)(DType dst_dtype, std::byte* dst, DType src_dtype, const std::byte* src,
                  std::size_t count, float scale);
};

namespace generic {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

}  // namespace fastdist::host
