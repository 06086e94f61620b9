#include "net/sums.h"

#include "host/kernels.h"

namespace fastdist::net {
namespace {

template <class T>
void divide(std::byte* data, std::size_t count, std::size_t n) {
  auto* values = reinterpret_cast<T*>(data);
  for (std::size_t i = 0; i < count; ++i) values[i] /= static_cast<T>(n);
}

void divide(DType dtype, std::byte* data, std::size_t count, std::size_t n) {
  if (dtype == DType::kFloat32) return divide<float>(data, count, n);
  if (dtype == DType::kFloat64) return divide<double>(data, count, n);
  if (dtype == DType::kComplex64) return divide<float>(data, 2 * count, n);
  return divide<double>(data, 2 * count, n);
}

}  // namespace

DType dtype_of_sums(DType dtype) noexcept {
  const bool is_small = dtype == DType::kFloat16 || dtype == DType::kBFloat16 ||
                        dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2;
  return is_small ? DType::kFloat32 : dtype;
}

void finish_sums(DType wide, ReduceOp op, std::size_t ranks, std::byte* sums, DType dtype,
                 std::byte* to, std::size_t count) {
  if (op == ReduceOp::kMean) divide(wide, sums, count, ranks);
  if (wide != dtype) {
    host::convert(dtype, to, wide, sums, count, 1.0F);
  } else if (to != sums) {
    host::copy(to, sums, count * size_of(dtype), false);
  }
}

}  // namespace fastdist::net
