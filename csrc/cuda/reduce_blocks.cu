// Reductions that NCCL lacks, of blocks gathered from all ranks. A thread reads an element of each
// block and reduces them by the tree of core/reduction_tree.h, so every rank computes the same
// bits.

#include <cstdint>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/formats.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.cuh"

namespace fastdist::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostPending = 12;  // levels of the tree
constexpr int kMostBlocks = 1 << kMostPending;

struct Blocks {
  const std::byte* first;
  std::size_t stride;
  int count;
  std::byte* out;
  std::size_t bytes;
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

// Computes what the function of this name in core/reduction_tree.h does.
__device__ int reductions_after(unsigned k, unsigned count) {
  int found = 0;
  if (k + 1 < count) {
    for (; (k & 1U) != 0; k >>= 1) ++found;
  } else {
    for (; k != 0; k &= k - 1) ++found;
  }
  return found;
}

// Sums and products of floats are rounded; other results do not depend on the order.
template <class Value, class Operation>
constexpr bool kIsRounded =
    (std::is_same_v<Operation, Sum> || std::is_same_v<Operation, Product>) &&
    !std::is_integral_v<Value>;

template <class T, class Operation>
__global__ void __launch_bounds__(kThreads) reduce_kernel(Blocks blocks, float factor) {
  using W = Wide<T>;
  using Value = typename W::Type;
  constexpr bool kRounded = kIsRounded<Value, Operation>;
  // Few values that wait, so that they stay in registers: local memory is reserved for all threads
  // that a GPU can run.
  constexpr int kEach = kRounded && sizeof(T) == 1 ? 4 : kQuantumBytes / sizeof(T);
  struct alignas(kEach * sizeof(T)) Quantum {
    T values[kEach];
  };
  const std::size_t step = std::size_t{gridDim.x} * kThreads;
  const std::size_t quanta = blocks.bytes / sizeof(Quantum);
  for (std::size_t q = std::size_t{blockIdx.x} * kThreads + threadIdx.x; q < quanta; q += step) {
    Quantum quantum = reinterpret_cast<const Quantum*>(blocks.first)[q];
    Value sums[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) sums[i] = W::widen(quantum.values[i]);
    [[maybe_unused]] Value pending[kMostPending][kEach] = {};  // wait for their right sibling
    [[maybe_unused]] int depth = 0;
    for (int k = 1; k < blocks.count; ++k) {
      quantum = reinterpret_cast<const Quantum*>(blocks.first + blocks.stride * k)[q];
      [[maybe_unused]] int reductions = 1;
      if constexpr (kRounded) {
        reductions =
            reductions_after(static_cast<unsigned>(k), static_cast<unsigned>(blocks.count));
        if (reductions == 0) {
#pragma unroll
          for (int d = 0; d < kMostPending; ++d) {
            if (d != depth) continue;
#pragma unroll
            for (int i = 0; i < kEach; ++i) pending[d][i] = sums[i];
          }
#pragma unroll
          for (int i = 0; i < kEach; ++i) sums[i] = W::widen(quantum.values[i]);
          ++depth;
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        sums[i] = Operation::apply(sums[i], W::widen(quantum.values[i]));
      }
      if constexpr (kRounded) {
        for (; reductions > 1; --reductions) {
          --depth;
#pragma unroll
          for (int d = 0; d < kMostPending; ++d) {
            if (d != depth) continue;
#pragma unroll
            for (int i = 0; i < kEach; ++i) sums[i] = Operation::apply(pending[d][i], sums[i]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if constexpr (std::is_same_v<Value, float>) sums[i] *= factor;
      quantum.values[i] = W::narrow(sums[i]);
    }
    reinterpret_cast<Quantum*>(blocks.out)[q] = quantum;
  }
}

// The actions on a kernel: Launch and Load.
struct Launch {
  const Blocks& blocks;
  StreamHandle stream;

  template <class T, class Operation>
  void run(float factor = 1.0F) const {
    constexpr std::size_t kMostGrid = 4096;
    const std::size_t needed = (blocks.bytes / kQuantumBytes + kThreads - 1) / kThreads;
    const auto grid = static_cast<unsigned>(needed < kMostGrid ? needed : kMostGrid);
    launch(reduce_kernel<T, Operation>, grid, kThreads, stream, blocks, factor);
  }
};

struct Load {
  template <class T, class Operation>
  void run(float = 1.0F) const {
    load(reduce_kernel<T, Operation>);
  }
};

[[noreturn]] void throw_no_kernel(DType dtype, ReduceOp op) {
  refuse(ErrorCode::kUnsupported, "op=\"", name_of(op), "\" of ", name_of(dtype), " has no kernel");
}

template <class T, class Action>
bool visit_numbers(ReduceOp op, int count, const Action& action) {
  switch (op) {
    case ReduceOp::kSum:
      action.template run<T, Sum>();
      return true;
    case ReduceOp::kMean:
      action.template run<T, Sum>(1.0F / static_cast<float>(count));
      return true;
    case ReduceOp::kProd:
      action.template run<T, Product>();
      return true;
    case ReduceOp::kMin:
      action.template run<T, Min>();
      return true;
    case ReduceOp::kMax:
      action.template run<T, Max>();
      return true;
    case ReduceOp::kAnd:
    case ReduceOp::kOr:
    case ReduceOp::kXor:
      break;
  }
  return false;
}

// Calls `action` with the kernel for a reduction of `count` blocks. Returns false if there is none.
template <class Action>
bool visit(DType dtype, ReduceOp op, int count, const Action& action) {
  // Bitwise operations do not depend on the dtype.
  if (op == ReduceOp::kAnd) return action.template run<std::uint64_t, And>(), true;
  if (op == ReduceOp::kOr) return action.template run<std::uint64_t, Or>(), true;
  if (op == ReduceOp::kXor) return action.template run<std::uint64_t, Xor>(), true;
  if (dtype == DType::kInt16) return visit_numbers<std::int16_t>(op, count, action);
  if (dtype == DType::kUInt16) return visit_numbers<std::uint16_t>(op, count, action);
  if (dtype == DType::kFloat8E4M3FN) return visit_numbers<__nv_fp8_e4m3>(op, count, action);
  if (dtype == DType::kFloat8E5M2) return visit_numbers<__nv_fp8_e5m2>(op, count, action);
  if (op != ReduceOp::kProd) return false;
  if (dtype == DType::kComplex64) return action.template run<Complex<float>, Product>(), true;
  if (dtype == DType::kComplex128) return action.template run<Complex<double>, Product>(), true;
  return false;
}

}  // namespace

void load_reduction_kernels() {
  for (const DType dtype : {DType::kInt16, DType::kUInt16, DType::kFloat8E4M3FN, DType::kFloat8E5M2,
                            DType::kComplex64, DType::kComplex128}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax,
                              ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor}) {
      (void)visit(dtype, op, 1, Load{});
    }
  }
}

void reduce_blocks(DType dtype, ReduceOp op, const std::byte* blocks, std::size_t stride, int count,
                   std::byte* out, std::size_t bytes, StreamHandle stream) {
  if (bytes == 0) return;
  if (count > kMostBlocks) {
    refuse(ErrorCode::kUnsupported, "reductions that NCCL lacks take at most ", kMostBlocks,
           " ranks, got ", count);
  }
  const Blocks all{blocks, stride, count, out, bytes};
  if (!visit(dtype, op, count, Launch{all, stream})) throw_no_kernel(dtype, op);
}

}  // namespace fastdist::cuda
