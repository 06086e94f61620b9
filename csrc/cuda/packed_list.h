// A list of arrays with its own buckets, packed and unpacked outside collectives, to measure the
// kernels.
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

  // Size of all buckets.
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;

  // Enqueue one launch per bucket on `stream`, which must belong to the list's device.
  virtual void pack(StreamHandle stream) = 0;
  virtual void unpack(StreamHandle stream) = 0;
};

// `arrays` must have one dtype, be on `device` and stay valid while the result is used. `wire` is
// the dtype they are cast to. Arrays larger than a bucket are cut.
[[nodiscard]] std::unique_ptr<PackedList> make_packed_list(const std::vector<TensorView>& arrays,
                                                           std::optional<DType> wire,
                                                           std::size_t bucket_bytes, int device);

}  // namespace fastdist::cuda
