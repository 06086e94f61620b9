#include "host/compress.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "host/kernels.h"

namespace fastdist::host {
namespace {

constexpr std::size_t kBucketElements = std::size_t{1} << 20;

// The largest sum that stays finite although every rank may round its part up by 1/17, and
// every machine the sum of its ranks.
constexpr float kLargestSum = 413.0F;

// Returns, per array, the power of two that maps n times the largest magnitude on any rank into
// range.
std::vector<float> agree_on_scales(Communicator& communicator, TensorViews in,
                                   const CallOptions& options) {
  std::vector<float> magnitudes(in.size());
  for (std::size_t i = 0; i < in.size(); ++i) {
    magnitudes[i] = static_cast<float>(largest_magnitude(in[i].dtype, in[i].data, in[i].count));
  }
  const TensorView view{reinterpret_cast<std::byte*>(magnitudes.data()), magnitudes.size(),
                        DType::kFloat32, 0};
  communicator.all_reduce({&view, 1}, {&view, 1}, ReduceOp::kMax, options);
  for (float& m : magnitudes) {
    const float most = m * static_cast<float>(communicator.size());
    const bool scalable = std::isfinite(most) && most > 0.0F;
    m = scalable ? std::exp2(std::floor(std::log2(kLargestSum / most))) : 1.0F;
    m = std::clamp(m, 0x1p-126F, 0x1p126F);
  }
  return magnitudes;
}

}  // namespace

void all_reduce_compressed(Communicator& communicator, TensorViews in, TensorViews out, ReduceOp op,
                           DType wire, const CallOptions& caller_options) {
  const Signature whole =
      signature_of({.op = Op::kAllReduce, .reduce_op = op, .compress = wire}, in);
  CallOptions options = caller_options;
  options.whole = &whole;
  std::vector<float> scales(in.size(), 1.0F);
  if (wire == DType::kFloat8E4M3FN) scales = agree_on_scales(communicator, in, options);

  const std::size_t item = size_of(wire);
  std::vector<std::byte> bucket;
  std::vector<TensorView> parts;  // of `out`, in their order in the bucket
  std::vector<float> part_scales;
  const auto flush = [&] {
    if (bucket.empty()) return;
    const TensorView view{bucket.data(), bucket.size() / item, wire, 0};
    communicator.all_reduce({&view, 1}, {&view, 1}, op, options);
    std::size_t at = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      convert(parts[i].dtype, parts[i].data, wire, bucket.data() + at, parts[i].count,
              1.0F / part_scales[i]);
      at += parts[i].count * item;
    }
    bucket.clear();
    parts.clear();
    part_scales.clear();
  };
  for (std::size_t i = 0; i < in.size(); ++i) {
    for (std::size_t done = 0; done < in[i].count;) {
      const std::size_t room = kBucketElements - bucket.size() / item;
      const std::size_t count = std::min(room, in[i].count - done);
      const std::size_t skip = done * size_of(in[i].dtype);
      const std::size_t at = bucket.size();
      bucket.resize(at + count * item);
      convert(wire, bucket.data() + at, in[i].dtype, in[i].data + skip, count, scales[i]);
      parts.push_back({out[i].data + skip, count, out[i].dtype, 0});
      part_scales.push_back(scales[i]);
      done += count;
      if (bucket.size() == kBucketElements * item) flush();
    }
  }
  flush();
}

}  // namespace fastdist::host
