// A list of arrays with buckets of its own, packed and unpacked outside of any collective: what the
// kernels take is measured by it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "core/types.h"
#include "cuda/stream.h"

namespace fastdist::cuda {

class PackedList {
 public:
  virtual ~PackedList() = default;

  [[nodiscard]] virtual std::size_t bucket_count() const noexcept = 0;
  // Of all buckets.
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;

  // A launch per bucket, enqueued on `stream`, which is of the device that the list lies on.
  virtual void pack(StreamHandle stream) = 0;
  virtual void unpack(StreamHandle stream) = 0;
};

// `arrays`: of one dtype, on `device`, and valid as long as the result is used. `wire`: what they
// are cast to. No array is too large for the buckets: it is cut.
[[nodiscard]] std::unique_ptr<PackedList> make_packed_list(const std::vector<TensorView>& arrays,
                                                           std::optional<DType> wire,
                                                           std::size_t bucket_bytes, int device);

}  // namespace fastdist::cuda
