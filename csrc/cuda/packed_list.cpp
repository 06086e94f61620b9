#include "cuda/packed_list.h"

#include <string>

#include "core/error.h"
#include "cuda/bucket_plan.h"
#include "cuda/buffer.h"
#include "cuda/kernels.h"
#include "cuda/moves.h"

namespace fastdist::cuda {
namespace {

DType dtype_of(TensorViews arrays) {
  if (arrays.empty()) throw Error(ErrorCode::kValue, "expected at least one array, got none");
  for (const TensorView& array : arrays) {
    if (array.dtype == arrays[0].dtype) continue;
    throw Error(ErrorCode::kValue, "expected arrays of one dtype, got " +
                                       std::string(name_of(arrays[0].dtype)) + " and " +
                                       std::string(name_of(array.dtype)));
  }
  return arrays[0].dtype;
}

DType checked_wire(DType dtype, DType wire) {
  if (wire == dtype || dtype == DType::kFloat32 || dtype == DType::kFloat64) return wire;
  throw Error(ErrorCode::kType,
              "compress works on float32 and float64 arrays, got " + std::string(name_of(dtype)));
}

struct PackedBucket {
  Moves moves;
  Cast cast;
  DeviceBuffer memory;
};

class DevicePackedList final : public PackedList {
 public:
  DevicePackedList(TensorViews arrays, std::optional<DType> wire, std::size_t bucket_bytes,
                   int device)
      : device_(device) {
    const DType dtype = dtype_of(arrays);
    const DeviceGuard guard(device);
    // Always pass a dtype to cast to, so that the plan puts every array into buckets.
    const BucketPlan plan =
        plan_buckets(arrays, checked_wire(dtype, wire.value_or(dtype)), bucket_bytes);
    for (const Bucket& bucket : plan.buckets) {
      buckets_.push_back(
          {moves_of(bucket, arrays), Cast{bucket.dtype}, DeviceBuffer(bucket.bytes)});
      bytes_ += bucket.bytes;
    }
  }

  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }

  void pack(StreamHandle stream) override {
    const DeviceGuard guard(device_);
    for (const PackedBucket& b : buckets_) cuda::pack(b.moves, b.memory.data(), b.cast, stream);
  }

  void unpack(StreamHandle stream) override {
    const DeviceGuard guard(device_);
    for (const PackedBucket& b : buckets_) cuda::unpack(b.moves, b.memory.data(), b.cast, stream);
  }

 private:
  int device_;
  std::vector<PackedBucket> buckets_;
  std::size_t bytes_ = 0;
};

}  // namespace

std::unique_ptr<PackedList> make_packed_list(const std::vector<TensorView>& arrays,
                                             std::optional<DType> wire, std::size_t bucket_bytes,
                                             int device) {
  return std::make_unique<DevicePackedList>(arrays, wire, bucket_bytes, device);
}

}  // namespace fastdist::cuda
