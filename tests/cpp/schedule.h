// Random sequences of collectives that every rank derives from one seed, with fresh data in every
// call and every result checked, to find races: sizes are on both sides of every threshold, ranks
// are delayed at random, and calls follow each other immediately. The sequences are the same in
// every run; FASTDIST_TEST_SEED changes them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "world.h"

namespace fastdist::test {

inline std::uint64_t extra_seed() {
  const char* text = std::getenv("FASTDIST_TEST_SEED");
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10) * 10'000;
}

class Schedule {
 public:
  // `shares_memory`: put some arrays in shared memory, on some ranks.
  Schedule(HostCommunicator& c, std::uint64_t seed, bool shares_memory)
      : c_(c),
        n_(static_cast<std::size_t>(c.size())),
        me_(static_cast<std::size_t>(c.rank())),
        together_(seed + extra_seed()),
        alone_((seed + extra_seed()) * 1000 + me_),
        shares_memory_(shares_memory) {}

  void run(int calls) {
    for (int i = 0; i < calls; ++i) {
      ++call_;
      if (alone_() % 8 == 0) std::this_thread::yield();
      if (alone_() % 64 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(alone_() % 200));
      step();
    }
  }

 private:
  void step() {
    switch (together_() % 11) {
      case 0:
        return all_reduce();
      case 1:
        return all_reduce_list();
      case 2:
        return reduce();
      case 3:
        return reduce_scatter();
      case 4:
        return broadcast();
      case 5:
        return all_gather();
      case 6:
        return gather();
      case 7:
        return scatter();
      case 8:
        return all_to_all();
      case 9:
        return ring();
      default:
        return c_.barrier(patient());
    }
  }

  // Returns mostly small sizes, some of several chunks, some zero.
  std::size_t size(std::size_t scale = 1) {
    static constexpr std::size_t kMost[] = {4, 40, 200, 300, 2000, 5000};
    return together_() % 12 == 0 ? 0 : together_() % (kMost[together_() % 6] / scale + 1);
  }
  std::size_t root() { return together_() % n_; }

  template <class T>
  Array array(std::size_t count) {
    if (shares_memory_ && alone_() % 2 == 0) return Array(c_, kDTypeOf<T>, count);
    return Array(kDTypeOf<T>, count, alone_() % 3 * sizeof(T));
  }
  // Element i of rank r's input: small integers, so that sums are exact.
  [[nodiscard]] std::uint64_t value(std::size_t r, std::size_t i) const {
    return mix(call_, r, i) % 1000;
  }
  template <class T>
  Array input(std::size_t count, std::size_t first = 0) {
    Array a = array<T>(count);
    for (std::size_t i = 0; i < count; ++i) a.as<T>()[i] = static_cast<T>(value(me_, first + i));
    return a;
  }
  template <class T>
  Array output(std::size_t count) {
    Array a = array<T>(count);
    std::fill_n(a.as<T>(), count, static_cast<T>(77777));
    return a;
  }
  template <class T>
  void check(const Array& a, std::size_t at, T expected, const char* what) const {
    CHECK_THAT(a.as<T>()[at] == expected, what << ", call " << call_ << ", rank " << me_ << " of "
                                               << n_ << ", element " << at << " of " << a.count()
                                               << ": got " << a.as<T>()[at] << ", expected "
                                               << expected);
  }
  [[nodiscard]] double reduced(ReduceOp op, std::size_t i) const {
    std::uint64_t v = value(0, i);
    for (std::size_t r = 1; r < n_; ++r) {
      const std::uint64_t w = value(r, i);
      v = op == ReduceOp::kSum ? v + w : op == ReduceOp::kMin ? std::min(v, w) : std::max(v, w);
    }
    return static_cast<double>(v);
  }
  ReduceOp op() {
    static constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax};
    return kOps[together_() % 3];
  }
  template <class T>
  void check_input_unchanged(const Array& in, std::size_t first, const char* what) const {
    for (std::size_t i = 0; i < in.count(); ++i) {
      check<T>(in, i, static_cast<T>(value(me_, first + i)), what);
    }
  }

  void all_reduce() {
    const std::size_t count = size();
    const ReduceOp how = op();
    const Array in = input<float>(count);
    const bool in_place = alone_() % 2 == 0;
    const Array separate = output<float>(count);
    const Array& out = in_place ? in : separate;
    c_.all_reduce(in.views(), out.views(), how, patient());
    for (std::size_t i = 0; i < count; ++i) {
      check(out, i, static_cast<float>(reduced(how, i)), "all_reduce");
    }
    if (!in_place) check_input_unchanged<float>(in, 0, "all_reduce's input");
  }

  // Reduces arrays of two dtypes.
  void all_reduce_list() {
    const std::size_t arrays = together_() % 6;
    const bool mixed = together_() % 2 == 0;
    const ReduceOp how = op();
    std::vector<Array> ins;
    std::vector<TensorView> views;
    std::vector<std::size_t> firsts;
    std::size_t first = 0;
    for (std::size_t k = 0; k < arrays; ++k) {
      const std::size_t count = size(3);
      ins.push_back(mixed && k % 2 == 1 ? input<double>(count, first)
                                        : input<std::int32_t>(count, first));
      views.push_back(ins.back().view());
      firsts.push_back(first);
      first += count;
    }
    c_.all_reduce(views, views, how, patient());
    for (std::size_t k = 0; k < arrays; ++k) {
      for (std::size_t i = 0; i < ins[k].count(); ++i) {
        const double expected = reduced(how, firsts[k] + i);
        if (mixed && k % 2 == 1) {
          check(ins[k], i, expected, "all_reduce of a list");
        } else {
          check(ins[k], i, static_cast<std::int32_t>(expected), "all_reduce of a list");
        }
      }
    }
  }

  void reduce() {
    const std::size_t count = size();
    const std::size_t to = root();
    const ReduceOp how = op();
    const Array in = input<double>(count);
    const Array out = output<double>(count);
    const bool in_place = alone_() % 2 == 0;
    const Array& result = in_place ? in : out;
    c_.reduce(in.views(), me_ == to ? result.views() : TensorViews{}, how, static_cast<int>(to),
              patient());
    if (me_ == to) {
      for (std::size_t i = 0; i < count; ++i) check(result, i, reduced(how, i), "reduce");
    } else {
      check_input_unchanged<double>(in, 0, "reduce's input");
    }
  }

  void reduce_scatter() {
    const std::size_t count = size(n_);
    const ReduceOp how = op();
    const Array in = input<std::int32_t>(count * n_);
    const Array out = output<std::int32_t>(count);
    c_.reduce_scatter(in.view(), out.view(), how, patient());
    for (std::size_t i = 0; i < count; ++i) {
      check(out, i, static_cast<std::int32_t>(reduced(how, me_ * count + i)), "reduce_scatter");
    }
    check_input_unchanged<std::int32_t>(in, 0, "reduce_scatter's input");
  }

  void broadcast() {
    const std::size_t arrays = together_() % 3 == 0 ? together_() % 5 : 1;
    const std::size_t from = root();
    std::vector<Array> data;
    std::vector<TensorView> views;
    std::vector<std::size_t> firsts;
    std::size_t first = 0;
    for (std::size_t k = 0; k < arrays; ++k) {
      const std::size_t count = size(arrays);
      data.push_back(me_ == from ? input<float>(count, first) : output<float>(count));
      views.push_back(data.back().view());
      firsts.push_back(first);
      first += count;
    }
    c_.broadcast(views, static_cast<int>(from), patient());
    for (std::size_t k = 0; k < arrays; ++k) {
      for (std::size_t i = 0; i < data[k].count(); ++i) {
        check(data[k], i, static_cast<float>(value(from, firsts[k] + i)), "broadcast");
      }
    }
  }

  void all_gather() {
    const std::size_t count = size(n_);
    const Array in = input<std::int32_t>(count);
    const Array out = output<std::int32_t>(count * n_);
    c_.all_gather(in.view(), out.view(), patient());
    check_joined(out, count, "all_gather");
  }

  void gather() {
    const std::size_t count = size(n_);
    const std::size_t to = root();
    const Array in = input<std::int32_t>(count);
    const Array out = output<std::int32_t>(me_ == to ? count * n_ : 0);
    c_.gather(in.view(), me_ == to ? out.view() : TensorView{}, static_cast<int>(to), patient());
    if (me_ == to) check_joined(out, count, "gather");
  }

  void check_joined(const Array& out, std::size_t count, const char* what) const {
    for (std::size_t r = 0; r < n_; ++r) {
      for (std::size_t i = 0; i < count; ++i) {
        check(out, r * count + i, static_cast<std::int32_t>(value(r, i)), what);
      }
    }
  }

  void scatter() {
    const std::size_t count = size(n_);
    const std::size_t from = root();
    const Array in = input<std::uint64_t>(me_ == from ? count * n_ : 0);
    const Array out = output<std::uint64_t>(count);
    c_.scatter(me_ == from ? in.view() : TensorView{}, out.view(), static_cast<int>(from),
               patient());
    for (std::size_t i = 0; i < count; ++i) {
      check(out, i, value(from, me_ * count + i), "scatter");
    }
  }

  void all_to_all() {
    std::vector<std::size_t> counts(n_ * n_);
    const bool equal = together_() % 3 == 0;
    const std::size_t each = size(n_);
    for (std::size_t& k : counts) k = equal ? each : size(n_);
    const auto sum_of = [&](std::size_t first, std::size_t stride, std::size_t terms) {
      std::size_t sum = 0;
      for (std::size_t k = 0; k < terms; ++k) sum += counts[first + k * stride];
      return sum;
    };
    const Array in = input<std::int32_t>(sum_of(me_ * n_, 1, n_));
    const Array out = output<std::int32_t>(sum_of(me_, n_, n_));
    c_.all_to_all(in.view(), out.view(), equal ? std::vector<std::size_t>{} : counts, patient());
    std::size_t at = 0;
    for (std::size_t r = 0; r < n_; ++r) {
      const std::size_t skip = sum_of(r * n_, 1, me_);
      for (std::size_t i = 0; i < counts[r * n_ + me_]; ++i) {
        check(out, at++, static_cast<std::int32_t>(value(r, skip + i)), "all_to_all");
      }
    }
  }

  // Every rank sends to the next rank and receives from the previous one: concurrently in two
  // threads, or in one thread with even ranks sending first.
  void ring() {
    if (n_ == 1) return;
    const std::size_t transfers = 1 + together_() % 3;
    std::vector<std::size_t> counts(transfers);
    for (std::size_t& k : counts) k = size();
    const bool at_once = together_() % 4 == 0;
    const auto next = static_cast<int>((me_ + 1) % n_);
    const std::size_t before = (me_ + n_ - 1) % n_;
    std::vector<Array> ins;
    std::vector<Array> outs;
    for (const std::size_t k : counts) {
      ins.push_back(input<float>(k));
      outs.push_back(output<float>(k));
    }
    const auto send = [&] {
      for (const Array& a : ins) c_.send(a.view(), next, patient());
    };
    const auto receive = [&] {
      for (const Array& a : outs) c_.recv(a.view(), static_cast<int>(before), patient());
    };
    if (at_once) {
      c_.count_submitted(1);  // while one thread waits, the other may act
      in_threads(2, [&](int t) { t == 0 ? send() : receive(); });
      c_.count_submitted(-1);
    } else if (me_ % 2 == 0) {
      send();
      receive();
    } else {
      receive();
      send();
    }
    for (std::size_t t = 0; t < transfers; ++t) {
      for (std::size_t i = 0; i < counts[t]; ++i) {
        check(outs[t], i, static_cast<float>(value(before, i)), "send and recv");
      }
    }
  }

  HostCommunicator& c_;
  std::size_t n_;
  std::size_t me_;
  std::mt19937_64 together_;  // in the same state on every rank
  std::mt19937_64 alone_;
  bool shares_memory_;
  std::uint64_t call_ = 0;
};

}  // namespace fastdist::test
