// The kernels against their CPU twins, on random data and poisoned outputs. Needs a GPU, or virtual
// GPUs, which try less; without one, every case reports that and ends.

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/bucket_plan.h"
#include "cuda/check.h"
#include "cuda/devices.h"
#include "cuda/kernels.h"
#include "cuda/stream.h"
#include "kernel_twin.h"

namespace fastdist::test {
namespace {

using cuda::Bucket;
using cuda::Cast;
using cuda::DeviceBuffer;

#ifdef FASTDIST_ON_VIRTUAL_GPUS
constexpr int kShare = 10;
#else
constexpr int kShare = 1;
#endif

bool is_skipped() {
  const std::string why = cuda::why_unusable();
  if (!why.empty()) std::printf("no GPU (%s) ", why.c_str());
  return !why.empty();
}

std::mt19937_64 fresh() {
  std::random_device device;
  const std::uint64_t seed = device();
  std::printf("seed %llu ", static_cast<unsigned long long>(seed));
  return std::mt19937_64(seed);
}

std::vector<std::byte> to_host(const std::byte* device, std::size_t bytes) {
  std::vector<std::byte> host(bytes);
  FASTDIST_CUDA_CHECK(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
  return host;
}

void to_device(std::byte* device, const std::vector<std::byte>& host) {
  FASTDIST_CUDA_CHECK(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice));
}

// A list in host memory and its copy in device memory, with arrays at random multiples of their
// item.
struct Lists {
  std::vector<std::byte> memory;
  DeviceBuffer device_memory;
  std::vector<TensorView> host;
  std::vector<TensorView> device;

  Lists(std::mt19937_64& random, std::size_t arrays, std::size_t most,
        const std::vector<DType>& dtypes) {
    std::vector<std::size_t> starts;
    std::size_t at = 0;
    for (std::size_t i = 0; i < arrays; ++i) {
      const DType dtype = dtypes[random() % dtypes.size()];
      const std::size_t item = size_of(dtype);
      at = (at + item - 1) / item * item + random() % 3 * item;
      const std::size_t count = random() % 4 == 0 ? random() % 3 : random() % (most + 1);
      host.push_back({nullptr, count, dtype, 0});
      starts.push_back(at);
      at += count * item;
    }
    memory.resize(at + 16);
    device_memory = DeviceBuffer(at + 16);
    device = host;
    for (std::size_t i = 0; i < arrays; ++i) {
      host[i].data = memory.data() + starts[i];
      device[i].data = device_memory.data() + starts[i];
    }
  }
  void fill(std::mt19937_64& random) {
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    to_device(device_memory.data(), memory);
  }
  // Finite numbers of very different magnitudes.
  void fill_with_floats(std::mt19937_64& random) {
    for (const TensorView& view : host) {
      const double size = std::exp2(static_cast<double>(random() % 40) - 20.0);
      for (std::size_t i = 0; i < view.count; ++i) {
        const double x = size * (static_cast<double>(random() % 20001) / 10000.0 - 1.0);
        if (view.dtype == DType::kFloat64) {
          std::memcpy(view.data + i * 8, &x, 8);
        } else {
          const auto narrow = static_cast<float>(x);
          std::memcpy(view.data + i * 4, &narrow, 4);
        }
      }
    }
    to_device(device_memory.data(), memory);
  }
};

const std::vector<DType> kAll = [] {
  std::vector<DType> all;
  for (int d = 0; d < kDTypeCount; ++d) all.push_back(static_cast<DType>(d));
  return all;
}();

// Marks the bytes of the bucket that belong to elements; padding may hold anything.
void check_same_pieces(const Bucket& bucket, const std::vector<std::byte>& a,
                       const std::vector<std::byte>& b) {
  for (const cuda::Piece& piece : bucket.pieces) {
    CHECK(std::memcmp(a.data() + piece.at, b.data() + piece.at,
                      piece.count * size_of(bucket.dtype)) == 0);
  }
}

CASE(gpu_packs_and_unpacks_as_the_twin) {
  if (is_skipped()) return;
  std::mt19937_64 random = fresh();
  for (int trial = 0; trial < 200 / kShare; ++trial) {
    Lists lists(random, 1 + random() % (trial % 7 == 0 ? 1500 : 60), trial % 5 == 0 ? 200'000 : 700,
                kAll);
    lists.fill(random);
    for (const Bucket& bucket : cuda::plan_buckets(lists.host, {}, 1 << 20).buckets) {
      std::vector<std::byte> expected(bucket.bytes);
      pack_twin(cuda::moves_of(bucket, lists.host), expected.data(), bucket.dtype);
      const DeviceBuffer packed(bucket.bytes);
      FASTDIST_CUDA_CHECK(cudaMemset(packed.data(), 0xA5, bucket.bytes));
      const cuda::Moves moves = cuda::moves_of(bucket, lists.device);
      cuda::pack(moves, packed.data(), Cast{bucket.dtype}, nullptr);
      check_same_pieces(bucket, to_host(packed.data(), bucket.bytes), expected);
      for (const cuda::Piece& piece : bucket.pieces) {
        const TensorView& view = lists.device[piece.array];
        FASTDIST_CUDA_CHECK(cudaMemset(view.data + piece.begin * size_of(view.dtype), 0x5A,
                                       piece.count * size_of(view.dtype)));
      }
      cuda::unpack(moves, packed.data(), Cast{bucket.dtype}, nullptr);
    }
    CHECK(to_host(lists.device_memory.data(), lists.memory.size()) == lists.memory);
  }
}

CASE(gpu_casts_as_the_twin) {
  if (is_skipped()) return;
  std::mt19937_64 random = fresh();
  for (const DType wire : {DType::kFloat16, DType::kBFloat16}) {
    for (int trial = 0; trial < 40 / kShare; ++trial) {
      // The CPU rounds float64 once, the GPU through float32.
      Lists lists(random, 1 + random() % 60, trial % 5 == 0 ? 100'000 : 700, {DType::kFloat32});
      lists.fill_with_floats(random);
      const auto plan = cuda::plan_buckets(lists.host, wire, 1 << 18);
      const Cast cast{wire, 0.5F};
      for (const Bucket& bucket : plan.buckets) {
        std::vector<std::byte> expected(bucket.bytes);
        pack_twin(cuda::moves_of(bucket, lists.host), expected.data(), wire);
        const DeviceBuffer packed(bucket.bytes);
        FASTDIST_CUDA_CHECK(cudaMemset(packed.data(), 0xA5, bucket.bytes));
        const cuda::Moves moves = cuda::moves_of(bucket, lists.device);
        cuda::pack(moves, packed.data(), cast, nullptr);
        check_same_pieces(bucket, to_host(packed.data(), bucket.bytes), expected);
        unpack_twin(cuda::moves_of(bucket, lists.host), expected.data(), wire, 0.5F);
        cuda::unpack(moves, packed.data(), cast, nullptr);
      }
      CHECK(to_host(lists.device_memory.data(), lists.memory.size()) == lists.memory);
    }
  }
}

}  // namespace
}  // namespace fastdist::test
