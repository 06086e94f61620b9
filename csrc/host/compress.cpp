#include "host/compress.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/array_list.h"
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

  // The run of all arrays, a byte for each element.
  std::vector<TensorView> each;
  for (const TensorView& view : in) each.push_back({view.data, view.count, DType::kUInt8});
  const ArrayList elements(each);
  const std::size_t item = size_of(wire);
  std::vector<std::byte> bucket(std::min(kBucketElements, elements.bytes()) * item);
  for (std::size_t begin = 0; begin < elements.bytes(); begin += kBucketElements) {
    const std::size_t end = std::min(elements.bytes(), begin + kBucketElements);
    elements.for_each_piece(begin, end, [&](const ArrayList::Piece& piece) {
      const TensorView& from = in[piece.array];
      convert(wire, bucket.data() + (piece.run_at - begin) * item, from.dtype,
              from.data + piece.at * size_of(from.dtype), piece.bytes, scales[piece.array]);
    });
    const TensorView view{bucket.data(), end - begin, wire};
    communicator.all_reduce({&view, 1}, {&view, 1}, op, options);
    elements.for_each_piece(begin, end, [&](const ArrayList::Piece& piece) {
      const TensorView& to = out[piece.array];
      convert(to.dtype, to.data + piece.at * size_of(to.dtype), wire,
              bucket.data() + (piece.run_at - begin) * item, piece.bytes,
              1.0F / scales[piece.array]);
    });
  }
}

}  // namespace fastdist::host
