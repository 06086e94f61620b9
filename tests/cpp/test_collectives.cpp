// Every dtype and reduction with every method, against one call of the kernel on all inputs: the
// bits must be equal on every rank and for every method.

#include <cstring>
#include <vector>

#include "check.h"
#include "host/kernels.h"
#include "world.h"

namespace fastdist::test {
namespace {

constexpr std::size_t kCounts[] = {0, 1, 3, 7, 16, 65, 300, 1001};

std::vector<Tuning> all_tunings() {
  return {tiny_tuning(), staged_tuning(), in_place_tuning(), payload_tuning()};
}

bool is_defined(ReduceOp op, DType dtype) {
  try {
    check_reducible(op, dtype);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Fills rank r's element, without NaN, whose bits may differ between loops.
void fill(DType dtype, std::byte* data, std::size_t count, std::uint64_t call, std::uint64_t rank) {
  const std::size_t item = size_of(dtype);
  for (std::size_t i = 0; i < count * item; ++i)
    data[i] = static_cast<std::byte>(mix(call, rank, i));
  const auto clear = [&](std::size_t width, std::byte mask) {  // clears the exponent's top bit
    for (std::size_t i = width - 1; i < count * item; i += width) data[i] &= mask;
  };
  switch (dtype) {
    case DType::kBool:
      return clear(1, std::byte{1});
    case DType::kFloat16:
    case DType::kBFloat16:
      return clear(2, std::byte{0xBF});
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2:
      return clear(1, std::byte{0xBF});
    case DType::kFloat32:
    case DType::kComplex64:
      return clear(4, std::byte{0xBF});
    case DType::kFloat64:
    case DType::kComplex128:
      return clear(8, std::byte{0xBF});
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt8:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
      return;
  }
}

std::vector<std::byte> reduced(DType dtype, ReduceOp op, std::size_t count, std::uint64_t call,
                               int n) {
  std::vector<std::vector<std::byte>> inputs;
  std::vector<const std::byte*> sources;
  for (int r = 0; r < n; ++r) {
    inputs.emplace_back(count * size_of(dtype) + 1);  // + 1: an empty array has an address too
    fill(dtype, inputs.back().data(), count, call, static_cast<std::uint64_t>(r));
  }
  for (const auto& input : inputs) sources.push_back(input.data());
  std::vector<std::byte> result(count * size_of(dtype) + 1);
  host::reduce(dtype, op, result.data(), nullptr, sources, count);
  return result;
}

void check_same(const Array& got, const std::byte* expected, const char* what, DType dtype,
                ReduceOp op) {
  const std::size_t bytes = got.view().bytes();
  CHECK_THAT(bytes == 0 || std::memcmp(got.view().data, expected, bytes) == 0,
             what << " " << name_of(op) << " of " << name_of(dtype) << " × " << got.count());
}

void check_dtype(HostCommunicator& c, DType dtype) {
  const int n = c.size();
  const auto ranks = static_cast<std::size_t>(n);
  const auto me = static_cast<std::uint64_t>(c.rank());
  std::uint64_t call = 0;
  for (int o = 0; o < kReduceOpCount; ++o) {
    const auto op = static_cast<ReduceOp>(o);
    if (!is_defined(op, dtype)) continue;
    for (const std::size_t count : kCounts) {
      const Array in(dtype, count);
      const Array out(dtype, count);
      fill(dtype, in.view().data, count, ++call, me);
      const auto expected = reduced(dtype, op, count, call, n);
      c.all_reduce(in.views(), out.views(), op, patient());
      check_same(out, expected.data(), "all_reduce", dtype, op);
      c.all_reduce(in.views(), in.views(), op, patient());
      check_same(in, expected.data(), "all_reduce in place", dtype, op);

      const int root = static_cast<int>(call % ranks);
      fill(dtype, in.view().data, count, call, me);
      c.reduce(in.views(), c.rank() == root ? out.views() : TensorViews{}, op, root, patient());
      if (c.rank() == root) check_same(out, expected.data(), "reduce", dtype, op);

      const Array wide(dtype, count * ranks);
      fill(dtype, wide.view().data, count * ranks, ++call, me);
      const auto all = reduced(dtype, op, count * ranks, call, n);
      c.reduce_scatter(wide.view(), out.view(), op, patient());
      check_same(out, all.data() + me * out.view().bytes(), "reduce_scatter", dtype, op);
    }
  }
}

void check_dtypes(int n) {
  for (const Tuning& tuning : all_tunings()) {
    with_threads(n, tuning, [](HostCommunicator& c) {
      for (int d = 0; d < kDTypeCount; ++d) check_dtype(c, static_cast<DType>(d));
    });
  }
}

CASE(every_dtype_and_op_alone) { check_dtypes(1); }
CASE(every_dtype_and_op_with_2_ranks) { check_dtypes(2); }
CASE(every_dtype_and_op_with_3_ranks) { check_dtypes(3); }
CASE(every_dtype_and_op_with_4_ranks) { check_dtypes(4); }
CASE(every_dtype_and_op_with_7_ranks) { check_dtypes(7); }

// Slow readers must not see a later round of a range that all ranks read: a broadcast of many
// rounds with ranks that are delayed at different times.
CASE(a_shared_range_waits_for_its_slowest_reader) {
  Tuning tuning = staged_tuning();
  tuning.chunk_bytes = 4096;
  for (const int n : {3, 7}) {
    with_threads(n, tuning, [](HostCommunicator& c) {
      const Array a(DType::kInt32, 100'000);
      for (int trial = 0; trial < 20; ++trial) {
        const int root = trial % c.size();
        for (std::size_t i = 0; i < a.count(); ++i) {
          a.as<std::int32_t>()[i] = c.rank() == root ? static_cast<std::int32_t>(i) + trial : -1;
        }
        c.broadcast(a.views(), root, patient());
        for (std::size_t i = 0; i < a.count(); ++i) {
          CHECK_THAT(a.as<std::int32_t>()[i] == static_cast<std::int32_t>(i) + trial,
                     "element " << i << ", rank " << c.rank() << ", root " << root);
        }
      }
    });
  }
}

CASE(lists_give_the_bits_of_single_calls) {
  for (const int n : {2, 3}) {
    for (const Tuning& tuning : all_tunings()) {
      with_threads(n, tuning, [](HostCommunicator& c) {
        const std::size_t counts[] = {5, 0, 300, 17, 1, 120};
        std::vector<Array> single;
        std::vector<Array> listed;
        std::vector<TensorView> views;
        for (std::size_t k = 0; k < 6; ++k) {
          const DType dtype = k % 3 == 2 ? DType::kFloat16 : DType::kFloat32;
          for (auto* to : {&single, &listed}) {
            to->emplace_back(dtype, counts[k]);
            fill(dtype, to->back().view().data, counts[k], k, static_cast<std::uint64_t>(c.rank()));
          }
          views.push_back(listed.back().view());
          c.all_reduce(single.back().views(), single.back().views(), ReduceOp::kMean, patient());
        }
        c.all_reduce(views, views, ReduceOp::kMean, patient());
        for (std::size_t k = 0; k < 6; ++k) {
          check_same(listed[k], single[k].view().data, "list", listed[k].view().dtype,
                     ReduceOp::kMean);
        }
      });
    }
  }
}

CASE(send_and_recv_of_all_sizes_both_ways) {
  for (const Tuning& tuning : all_tunings()) {
    with_threads(2, tuning, [](HostCommunicator& c) {
      const int other = 1 - c.rank();
      for (std::size_t bytes = 0; bytes < 1500; bytes += 1 + bytes / 7) {
        const Array out(DType::kUInt8, bytes);
        const Array in(DType::kUInt8, bytes);
        fill(DType::kUInt8, out.view().data, bytes, bytes, static_cast<std::uint64_t>(c.rank()));
        c.count_submitted(1);  // two threads of this rank call at once
        in_threads(2, [&](int t) {
          if (t == 0) {
            c.send(out.view(), other, patient());
          } else {
            c.recv(in.view(), other, patient());
          }
        });
        c.count_submitted(-1);
        fill(DType::kUInt8, out.view().data, bytes, bytes, static_cast<std::uint64_t>(other));
        check_same(in, out.view().data, "send", DType::kUInt8, ReduceOp::kSum);
      }
    });
  }
}

CASE(a_communicator_of_some_ranks_of_a_machine) {
  const auto machine = Machine::of_threads(4);
  const Tuning tuning = staged_tuning();
  const std::vector<int> members{3, 1};
  std::vector<std::shared_ptr<SharedBlock>> blocks;
  std::vector<std::size_t> offsets;
  const SharedBlock first(machine, 1, 5000);  // makes the blocks' offsets differ
  for (const int m : members) {
    blocks.push_back(
        std::make_shared<SharedBlock>(machine, m, HostCommunicator::block_bytes(2, tuning)));
    offsets.push_back(blocks.back()->offset());
  }
  Ranks ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.push_back(std::make_unique<HostCommunicator>(
        machine, members, r, offsets, blocks[static_cast<std::size_t>(r)], tuning));
  }
  with_ranks(ranks, [](HostCommunicator& c) {
    const Array a(DType::kInt32, 500);
    std::fill_n(a.as<std::int32_t>(), a.count(), c.rank() + 1);
    c.all_reduce(a.views(), a.views(), ReduceOp::kSum, patient());
    CHECK(a.as<std::int32_t>()[499] == 3);
  });
}

}  // namespace
}  // namespace fastdist::test
