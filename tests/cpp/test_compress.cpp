// all_reduce with compression.

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "host/compress.h"
#include "host/kernels.h"
#include "world.h"

namespace fastdist::test {
namespace {

using host::all_reduce_compressed;

double relative_step(DType wire) {
  return wire == DType::kFloat16 ? 0x1p-11 : wire == DType::kBFloat16 ? 0x1p-8 : 0x1p-4;
}

CASE(sums_are_close_and_the_same_everywhere) {
  for (const int n : {1, 2, 3, 7}) {
    for (const DType wire : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3FN}) {
      std::vector<std::vector<float>> results(static_cast<std::size_t>(n));
      with_threads(n, tiny_tuning(), [&](HostCommunicator& c) {
        const std::size_t counts[] = {1000, 0, 3};
        std::vector<Array> arrays;
        std::vector<TensorView> views;
        for (std::size_t k = 0; k < 3; ++k) {
          arrays.emplace_back(DType::kFloat32, counts[k]);
          views.push_back(arrays.back().view());
          for (std::size_t i = 0; i < counts[k]; ++i) {
            arrays[k].as<float>()[i] =
                static_cast<float>(mix(k, static_cast<std::uint64_t>(c.rank()), i) % 1000) / 100.0F;
          }
        }
        all_reduce_compressed(c, views, views, ReduceOp::kSum, wire, patient());
        for (std::size_t k = 0; k < 3; ++k) {
          for (std::size_t i = 0; i < counts[k]; ++i) {
            double exact = 0;
            for (int r = 0; r < n; ++r) {
              exact += static_cast<float>(mix(k, static_cast<std::uint64_t>(r), i) % 1000) / 100.0F;
            }
            const double error = std::fabs(arrays[k].as<float>()[i] - exact);
            CHECK_THAT(
                error <= exact * 2.1 * relative_step(wire) + 0.1 * relative_step(wire) * 16 * n,
                name_of(wire) << " " << arrays[k].as<float>()[i] << " for " << exact);
            results[static_cast<std::size_t>(c.rank())].push_back(arrays[k].as<float>()[i]);
          }
        }
      });
      for (const auto& r : results) CHECK(r == results[0]);
    }
  }
}

// Powers of two are exact in any wire format.
CASE(doubles_and_means_and_separate_outputs) {
  with_threads(2, tiny_tuning(), [](HostCommunicator& c) {
    const Array in(DType::kFloat64, 100);
    const Array out(DType::kFloat64, 100);
    std::fill_n(in.as<double>(), 100, 8.0);
    all_reduce_compressed(c, in.views(), out.views(), ReduceOp::kMean, DType::kFloat8E4M3FN,
                          patient());
    for (std::size_t i = 0; i < 100; ++i)
      CHECK(out.as<double>()[i] == 8.0 && in.as<double>()[i] == 8.0);
  });
}

CASE(more_elements_than_a_bucket) {
  with_threads(2, Tuning{}, [](HostCommunicator& c) {
    const Array a(DType::kFloat32, (std::size_t{1} << 20) + 100'000);
    const Array b(DType::kFloat32, 10);
    for (std::size_t i = 0; i < a.count(); ++i) a.as<float>()[i] = static_cast<float>(i % 64);
    std::fill_n(b.as<float>(), 10, 3.0F);
    const std::vector<TensorView> views{a.view(), b.view()};
    all_reduce_compressed(c, views, views, ReduceOp::kSum, DType::kBFloat16, patient());
    for (std::size_t i = 0; i < a.count(); ++i)
      CHECK(a.as<float>()[i] == static_cast<float>(2 * (i % 64)));
    CHECK(b.as<float>()[9] == 6.0F);
  });
}

// Rounding up on every rank must not overflow a float8 sum. One communicator stands in for all
// ranks: its all_reduce multiplies by the number of ranks, as if all inputs were equal.
class Equals final : public Communicator {
 public:
  explicit Equals(int size) : size_(size) {}
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  void all_reduce(TensorViews in, TensorViews out, ReduceOp op, const CallOptions&) override {
    const std::vector<const std::byte*> same(static_cast<std::size_t>(size_), in[0].data);
    host::reduce(in[0].dtype, op, out[0].data, nullptr, same, in[0].count);
  }
  void reduce(TensorViews, TensorViews, ReduceOp, int, const CallOptions&) override {}
  void all_gather(TensorView, TensorView, const CallOptions&) override {}
  void gather(TensorView, TensorView, int, const CallOptions&) override {}
  void scatter(TensorView, TensorView, int, const CallOptions&) override {}
  void reduce_scatter(TensorView, TensorView, ReduceOp, const CallOptions&) override {}
  void all_to_all(TensorView, TensorView, std::span<const std::size_t>,
                  const CallOptions&) override {}
  void send(TensorView, int, const CallOptions&) override {}
  void recv(TensorView, int, const CallOptions&) override {}
  void barrier(const CallOptions&) override {}

 private:
  int size_;
};

CASE(float8_sums_stay_in_range) {
  for (int n = 1; n <= 64; ++n) {
    Equals c(n);
    for (int step = 0; step < 500; ++step) {
      const float v = std::exp2(static_cast<float>(step) / 500.0F);
      Array a(DType::kFloat32, 1);
      *a.as<float>() = v;
      all_reduce_compressed(c, a.views(), a.views(), ReduceOp::kSum, DType::kFloat8E4M3FN,
                            patient());
      CHECK_THAT(std::isfinite(*a.as<float>()), n << " ranks of " << v);
      CHECK(std::fabs(*a.as<float>() / (v * static_cast<float>(n)) - 1.0F) < 0.15F);
    }
  }
}

CASE(float8_takes_huge_and_tiny_values) {
  Equals c(4);
  for (const float v : {1e-30F, 1e-5F, 1e20F, 1e37F, 0.0F}) {
    Array a(DType::kFloat32, 1);
    *a.as<float>() = v;
    all_reduce_compressed(c, a.views(), a.views(), ReduceOp::kSum, DType::kFloat8E4M3FN, patient());
    CHECK_THAT(std::fabs(*a.as<float>() - 4 * v) <= 0.15F * 4 * v,
               v << " gives " << *a.as<float>());
  }
}

CASE(nan_and_infinity_stay_visible) {
  for (const DType wire : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3FN}) {
    Equals c(2);
    Array a(DType::kFloat32, 2);
    a.as<float>()[0] = std::numeric_limits<float>::quiet_NaN();
    a.as<float>()[1] = std::numeric_limits<float>::infinity();
    all_reduce_compressed(c, a.views(), a.views(), ReduceOp::kSum, wire, patient());
    CHECK(std::isnan(a.as<float>()[0]));
    CHECK(!std::isfinite(a.as<float>()[1]));
  }
}

}  // namespace
}  // namespace fastdist::test
