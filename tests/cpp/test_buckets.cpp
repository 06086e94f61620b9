// Bucket plans, and the parameters of the packing kernels.

#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/bucket_plan.h"
#include "kernel_twin.h"

namespace fastdist::test {
namespace {

using cuda::Bucket;
using cuda::BucketPlan;
using cuda::kQuantumBytes;
using cuda::plan_buckets;

// Arrays in separate memory, at random multiples of their item size.
class List {
 public:
  List(std::mt19937_64& random, std::size_t arrays, std::size_t most, std::vector<DType> dtypes) {
    std::vector<std::size_t> starts;
    std::size_t at = 0;
    for (std::size_t i = 0; i < arrays; ++i) {
      const DType dtype = dtypes[random() % dtypes.size()];
      const std::size_t item = size_of(dtype);
      at = (at + item - 1) / item * item + random() % 3 * item;
      const std::size_t count = random() % 4 == 0 ? random() % 3 : random() % (most + 1);
      views.push_back({nullptr, count, dtype, 0});
      starts.push_back(at);
      at += count * item;
    }
    memory.resize(at + 64);
    auto* base = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    for (std::size_t i = 0; i < arrays; ++i) views[i].data = base + starts[i];
  }
  List(const List&) = delete;
  List& operator=(const List&) = delete;

  std::vector<std::byte> memory;
  std::vector<TensorView> views;
};

// Checks that every element of every array is in one piece, in order, and that no two pieces share
// a quantum.
void check_plan(const BucketPlan& plan, TensorViews arrays, std::size_t limit) {
  std::vector<std::size_t> covered(arrays.size(), 0);
  for (const std::size_t i : plan.alone) covered[i] = arrays[i].count;
  for (const Bucket& bucket : plan.buckets) {
    CHECK(!bucket.pieces.empty() && bucket.pieces.size() <= cuda::kMostPieces);
    CHECK_THAT(bucket.bytes <= limit && bucket.bytes % kQuantumBytes == 0, bucket.bytes);
    std::size_t at = 0;
    for (const cuda::Piece& piece : bucket.pieces) {
      CHECK(piece.count > 0);
      CHECK(piece.begin == covered[piece.array]);
      CHECK(piece.begin * size_of(arrays[piece.array].dtype) % kQuantumBytes == 0);
      CHECK(piece.at == at);
      covered[piece.array] += piece.count;
      const std::size_t bytes = piece.count * size_of(bucket.dtype);
      at += (bytes + kQuantumBytes - 1) / kQuantumBytes * kQuantumBytes;
    }
    CHECK(at == bucket.bytes);
  }
  for (std::size_t i = 0; i < arrays.size(); ++i) CHECK_THAT(covered[i] == arrays[i].count, i);
}

const std::vector<DType> kAll = [] {
  std::vector<DType> all;
  for (int d = 0; d < kDTypeCount; ++d) all.push_back(static_cast<DType>(d));
  return all;
}();

CASE(plans_hold_every_element_once) {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const List list(random, random() % 60, 1 + random() % 3000, kAll);
    const std::size_t limit = 256 * (1 + random() % 64);
    check_plan(plan_buckets(list.views, {}, limit), list.views, limit);
  }
}

CASE(plans_of_casts_hold_every_element_once) {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    const List list(random, random() % 60, 1 + random() % 3000, {DType::kFloat32, DType::kFloat64});
    const DType wire = trial % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
    const std::size_t limit = 256 * (1 + random() % 64);
    const BucketPlan plan = plan_buckets(list.views, wire, limit);
    CHECK(plan.alone.empty());
    for (const Bucket& bucket : plan.buckets) CHECK(bucket.dtype == wire);
    check_plan(plan, list.views, limit);
  }
}

CASE(plans_do_not_depend_on_addresses) {
  std::vector<TensorView> here(7, {nullptr, 1001, DType::kFloat32, 0});
  std::vector<TensorView> there = here;
  for (std::size_t i = 0; i < here.size(); ++i) {
    here[i].data = reinterpret_cast<std::byte*>(4096 * (i + 1));
    there[i].data = reinterpret_cast<std::byte*>(1'000'004 * (i + 1));
  }
  const BucketPlan a = plan_buckets(here, {}, 8192);
  const BucketPlan b = plan_buckets(there, {}, 8192);
  CHECK(a.buckets.size() == b.buckets.size() && a.alone == b.alone);
  for (std::size_t k = 0; k < a.buckets.size(); ++k) {
    CHECK(a.buckets[k].bytes == b.buckets[k].bytes);
  }
}

CASE(large_arrays_stay_where_they_are) {
  const std::vector<TensorView> arrays{{nullptr, 100, DType::kFloat32, 0},
                                       {nullptr, 64, DType::kFloat32, 0},
                                       {nullptr, 0, DType::kFloat32, 0},
                                       {nullptr, 63, DType::kFloat32, 0}};
  const BucketPlan plan = plan_buckets(arrays, {}, 256);
  CHECK((plan.alone == std::vector<std::size_t>{0, 1}));
  CHECK(plan.buckets.size() == 1 && plan.buckets[0].bytes == 256);
}

CASE(buckets_end_where_a_launch_does) {
  const std::vector<TensorView> arrays(3000, {nullptr, 1, DType::kInt8, 0});
  const BucketPlan plan = plan_buckets(arrays, {}, std::size_t{1} << 26);
  CHECK(plan.buckets.size() == 3);
  CHECK(plan.buckets[0].pieces.size() == cuda::kMostPieces);
}

CASE(limits_are_kept_within_reason) {
  const std::vector<TensorView> arrays(4, {nullptr, 3, DType::kComplex128, 0});
  check_plan(plan_buckets(arrays, {}, 0), arrays, 256);
  check_plan(plan_buckets(arrays, {}, ~std::size_t{0}), arrays, cuda::kLargestBucket);
  CHECK(plan_buckets({}, {}, 4096).buckets.empty());
}

CASE(tiles_cover_every_quantum_once) {
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 50; ++trial) {
    const List list(random, 1 + random() % 40, trial % 5 == 0 ? 70'000 : 2000, kAll);
    for (const Bucket& bucket : plan_buckets(list.views, {}, 1 << 18).buckets) {
      const cuda::Moves moves = cuda::moves_of(bucket, list.views);
      CHECK(moves.moves.size() == bucket.pieces.size());
      std::vector<int> times(bucket.bytes / kQuantumBytes, 0);
      for_each_quantum(moves, bucket.dtype, [&](const cuda::Move& move, std::size_t quantum) {
        ++times[move.at + quantum];
      });
      for (const int n : times) CHECK(n == 1);
    }
  }
}

void fill(List& list, std::mt19937_64& random) {
  for (std::byte& byte : list.memory) byte = static_cast<std::byte>(random());
}

CASE(what_is_packed_comes_out_again) {
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 100; ++trial) {
    List list(random, random() % 40, trial % 5 == 0 ? 20'000 : 500, kAll);
    fill(list, random);
    const std::vector<std::byte> before = list.memory;
    const BucketPlan plan = plan_buckets(list.views, {}, 1 << 16);
    for (const Bucket& bucket : plan.buckets) {
      const cuda::Moves moves = cuda::moves_of(bucket, list.views);
      std::vector<std::byte> packed(bucket.bytes);
      pack_twin(moves, packed.data(), bucket.dtype);
      for (const cuda::Piece& piece : bucket.pieces) {
        const TensorView& view = list.views[piece.array];
        std::memset(view.data + piece.begin * size_of(view.dtype), 0xA5,
                    piece.count * size_of(view.dtype));
      }
      unpack_twin(moves, packed.data(), bucket.dtype, 1.0F);
    }
    CHECK(list.memory == before);
  }
}

CASE(casts_go_there_and_back) {
  std::mt19937_64 random(5);
  std::vector<float> values(10'000);
  std::vector<TensorView> views;
  for (std::size_t at = 0, k = 0; at < values.size(); ++k) {
    const std::size_t count = std::min<std::size_t>(values.size() - at, random() % 700);
    const float size = std::exp2(static_cast<float>(k % 40) - 20.0F);
    for (std::size_t i = 0; i < count; ++i) {
      values[at + i] = size * (static_cast<float>(random() % 2001) / 1000.0F - 1.0F);
    }
    views.push_back({reinterpret_cast<std::byte*>(values.data() + at), count, DType::kFloat32, 0});
    at += count;
  }
  const std::vector<float> before = values;
  const DType wire = DType::kBFloat16;
  for (const Bucket& bucket : plan_buckets(views, wire, 4096).buckets) {
    const cuda::Moves moves = cuda::moves_of(bucket, views);
    std::vector<std::byte> packed(bucket.bytes);
    pack_twin(moves, packed.data(), wire);
    unpack_twin(moves, packed.data(), wire, 1.0F);
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    CHECK(std::abs(values[i] - before[i]) <= std::abs(before[i]) / 256);  // 7 bits of mantissa
  }
}

}  // namespace
}  // namespace fastdist::test
