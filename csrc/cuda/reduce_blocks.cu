// Reductions that NCCL lacks, of blocks gathered from all ranks. One thread reads an element's
// blocks in rank order, so every rank computes the same bits.

#include <cstdint>
#include <string>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/formats.cuh"
#include "cuda/kernels.h"

namespace fastdist::cuda {
namespace {

constexpr int kThreads = 256;

struct Blocks {
  const std::byte* first;
  std::size_t stride;
  int count;
  std::byte* out;
  std::size_t quanta;
};

template <class T>
struct Complex {
  T re;
  T im;
};

// The accumulator type of an element, with its conversions.
template <class T>
struct Wide {
  using Type = T;
  __device__ static T widen(T x) { return x; }
  __device__ static T narrow(T x) { return x; }
};
template <class T>
struct WideFloat {
  using Type = float;
  __device__ static float widen(T x) { return to_float(x); }
  __device__ static T narrow(float x) { return from_float<T>(x); }
};
template <>
struct Wide<__nv_fp8_e4m3> : WideFloat<__nv_fp8_e4m3> {};
template <>
struct Wide<__nv_fp8_e5m2> : WideFloat<__nv_fp8_e5m2> {};
// The product of two uint16_t promoted to int would overflow.
template <>
struct Wide<std::uint16_t> {
  using Type = std::uint32_t;
  __device__ static std::uint32_t widen(std::uint16_t x) { return x; }
  __device__ static std::uint16_t narrow(std::uint32_t x) { return static_cast<std::uint16_t>(x); }
};

struct Sum {
  template <class T>
  __device__ static T apply(T a, T b) {
    return a + b;
  }
};
struct Product {
  template <class T>
  __device__ static T apply(T a, T b) {
    return a * b;
  }
  template <class T>
  __device__ static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};
// A NaN on any rank gives NaN, as on CPUs.
struct Min {
  template <class T>
  __device__ static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <class T>
  __device__ static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct And {
  __device__ static std::uint64_t apply(std::uint64_t a, std::uint64_t b) { return a & b; }
};
struct Or {
  __device__ static std::uint64_t apply(std::uint64_t a, std::uint64_t b) { return a | b; }
};
struct Xor {
  __device__ static std::uint64_t apply(std::uint64_t a, std::uint64_t b) { return a ^ b; }
};

template <class T, class Operation>
__global__ void __launch_bounds__(kThreads) reduce_kernel(Blocks blocks, float factor) {
  constexpr int kEach = kQuantumBytes / sizeof(T);
  struct alignas(16) Quantum {
    T values[kEach];
  };
  using W = Wide<T>;
  const std::size_t step = std::size_t{gridDim.x} * kThreads;
  for (std::size_t q = std::size_t{blockIdx.x} * kThreads + threadIdx.x; q < blocks.quanta;
       q += step) {
    Quantum quantum = reinterpret_cast<const Quantum*>(blocks.first)[q];
    typename W::Type sums[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) sums[i] = W::widen(quantum.values[i]);
    for (int k = 1; k < blocks.count; ++k) {
      quantum = reinterpret_cast<const Quantum*>(blocks.first + blocks.stride * k)[q];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        sums[i] = Operation::apply(sums[i], W::widen(quantum.values[i]));
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if constexpr (std::is_same_v<typename W::Type, float>) sums[i] *= factor;
      quantum.values[i] = W::narrow(sums[i]);
    }
    reinterpret_cast<Quantum*>(blocks.out)[q] = quantum;
  }
}

template <class T, class Operation>
void launch(const Blocks& blocks, StreamHandle stream, float factor = 1.0F) {
  constexpr std::size_t kMostBlocks = 4096;
  const std::size_t needed = (blocks.quanta + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(needed < kMostBlocks ? needed : kMostBlocks);
  reduce_kernel<T, Operation><<<grid, kThreads, 0, stream>>>(blocks, factor);
  check(cudaGetLastError(), "launch of reduce_kernel(");
}

[[noreturn]] void throw_no_kernel(DType dtype, ReduceOp op) {
  throw Error(ErrorCode::kUnsupported, "op=\"" + std::string(name_of(op)) + "\" of " +
                                           std::string(name_of(dtype)) + " has no kernel");
}

template <class T>
void reduce_numbers(DType dtype, ReduceOp op, const Blocks& blocks, StreamHandle stream) {
  switch (op) {
    case ReduceOp::kSum:
      return launch<T, Sum>(blocks, stream);
    case ReduceOp::kMean:
      return launch<T, Sum>(blocks, stream, 1.0F / static_cast<float>(blocks.count));
    case ReduceOp::kProd:
      return launch<T, Product>(blocks, stream);
    case ReduceOp::kMin:
      return launch<T, Min>(blocks, stream);
    case ReduceOp::kMax:
      return launch<T, Max>(blocks, stream);
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      break;
  }
  throw_no_kernel(dtype, op);
}

}  // namespace

void reduce_blocks(DType dtype, ReduceOp op, const std::byte* blocks, std::size_t stride, int count,
                   std::byte* out, std::size_t bytes, StreamHandle stream) {
  if (bytes == 0) return;
  const Blocks all{blocks, stride, count, out, bytes / kQuantumBytes};
  // Bitwise operations do not depend on the dtype.
  if (op == ReduceOp::kAnd) return launch<std::uint64_t, And>(all, stream);
  if (op == ReduceOp::kOr) return launch<std::uint64_t, Or>(all, stream);
  if (op == ReduceOp::kXor) return launch<std::uint64_t, Xor>(all, stream);
  if (dtype == DType::kInt16) return reduce_numbers<std::int16_t>(dtype, op, all, stream);
  if (dtype == DType::kUInt16) return reduce_numbers<std::uint16_t>(dtype, op, all, stream);
  if (dtype == DType::kFloat8E4M3FN) return reduce_numbers<__nv_fp8_e4m3>(dtype, op, all, stream);
  if (dtype == DType::kFloat8E5M2) return reduce_numbers<__nv_fp8_e5m2>(dtype, op, all, stream);
  if (op == ReduceOp::kProd && dtype == DType::kComplex64) {
    return launch<Complex<float>, Product>(all, stream);
  }
  if (op == ReduceOp::kProd && dtype == DType::kComplex128) {
    return launch<Complex<double>, Product>(all, stream);
  }
  throw_no_kernel(dtype, op);
}

}  // namespace fastdist::cuda
