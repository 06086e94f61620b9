// The functions that each instruction set provides; kernels.h describes them.
#pragma once

#include <cstddef>

#include "core/types.h"

namespace fastdist::host {

// `also` receives a copy of dst; it may be null.
using ReduceFunction = void (*)(std::byte* dst, std::byte* also, const std::byte* const* sources,
                                std::size_t n_sources, std::size_t count);

struct Kernels {
  std::string_view name;
  ReduceFunction (*reduce)(DType dtype, ReduceOp op);
  void (*copy)(std::byte* dst, const std::byte* src, std::size_t bytes, bool stream);
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
