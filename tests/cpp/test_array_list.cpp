// Lists of arrays viewed as one run, and signatures.

#include <random>
#include <vector>

#include "check.h"
#include "core/array_list.h"
#include "core/signature.h"

namespace fastdist::test {
namespace {

std::byte* address(std::size_t n) { return reinterpret_cast<std::byte*>(n); }

CASE(pieces_cover_every_range_once_and_in_order) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 20'000; ++trial) {
    std::vector<TensorView> arrays(random() % 8);
    std::size_t total = 0;
    for (TensorView& a : arrays) {
      a = {address(4096), random() % 4 == 0 ? 0 : random() % 50, DType::kInt32, 0};
      total += a.bytes();
    }
    const ArrayList list(arrays);
    CHECK(list.bytes() == total);
    CHECK(list.arrays().size() == arrays.size());
    const std::size_t begin = total == 0 ? 0 : random() % (total + 1);
    const std::size_t end = begin + (total == begin ? 0 : random() % (total - begin + 1));
    std::size_t at = begin;
    std::size_t last = 0;
    list.for_each_piece(begin, end, [&](const ArrayList::Piece& piece) {
      CHECK(piece.bytes > 0);
      CHECK(piece.run_at == at);
      CHECK(piece.array >= last && piece.array < arrays.size());
      CHECK(piece.at + piece.bytes <= arrays[piece.array].bytes());
      CHECK(piece.data == arrays[piece.array].data + piece.at);
      std::size_t start = 0;
      for (std::size_t k = 0; k < piece.array; ++k) start += arrays[k].bytes();
      CHECK(start + piece.at == piece.run_at);
      at += piece.bytes;
      last = piece.array;
    });
    CHECK(at == end);
  }
}

CASE(pieces_of_empty_lists) {
  const auto never = [](const ArrayList::Piece&) { CHECK(false); };
  ArrayList({}).for_each_piece(0, 0, never);
  const TensorView empty{nullptr, 0, DType::kFloat64, 0};
  ArrayList({&empty, 1}).for_each_piece(0, 0, never);
  const std::vector<TensorView> three(3, empty);
  ArrayList(three).for_each_piece(0, 0, never);
}

CASE(signatures_survive_packing) {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 1000; ++trial) {
    const Signature s{.op = static_cast<Op>(random() % 11),
                      .dtype = static_cast<DType>(random() % kDTypeCount),
                      .reduce_op = static_cast<ReduceOp>(random() % kReduceOpCount),
                      .root = static_cast<std::int16_t>(random()),
                      .order = static_cast<std::uint16_t>(random()),
                      .count = random(),
                      .list = random(),
                      .compress = trial % 2 == 0
                                      ? std::nullopt
                                      : std::optional(static_cast<DType>(random() % kDTypeCount))};
    const Signature t = unpack_signature(s.packed(), s.count, s.list);
    CHECK(t.op == s.op && t.dtype == s.dtype && t.reduce_op == s.reduce_op && t.root == s.root);
    CHECK(t.order == s.order && t.count == s.count && t.list == s.list && t.compress == s.compress);
    CHECK(!describe(s).empty());
  }
}

CASE(signatures_of_arrays_tell_their_size_and_order) {
  const TensorView a{nullptr, 10, DType::kFloat32, 7};
  const TensorView b{nullptr, 5, DType::kInt8, 0};
  const Signature call{.op = Op::kGather, .root = 3};
  const Signature one = signature_of(call, {&a, 1});
  CHECK(one.op == Op::kGather && one.root == 3 && one.dtype == DType::kFloat32);
  CHECK(one.count == 10 && one.order == 7 && one.list == 0);
  const std::vector<TensorView> both{a, b};
  const Signature list = signature_of(call, both);
  CHECK(list.count == 15 && list.order == 0 && list.list == list_word(both));
}

CASE(lists_that_differ_hash_differently) {
  const TensorView a{nullptr, 10, DType::kFloat32, 0};
  const TensorView b{nullptr, 11, DType::kFloat32, 0};
  const TensorView c{nullptr, 10, DType::kInt32, 0};
  const TensorView d{nullptr, 10, DType::kFloat32, 77};
  const std::vector<std::vector<TensorView>> lists{{},     {a},    {a, a}, {a, b}, {b, a},
                                                   {a, c}, {c, a}, {a, d}, {d, a}, {a, a, a}};
  for (std::size_t i = 0; i < lists.size(); ++i) {
    CHECK(list_word(lists[i]) != 0);
    for (std::size_t k = 0; k < lists.size(); ++k) {
      CHECK((list_word(lists[i]) == list_word(lists[k])) == (i == k));
    }
  }
}

CASE(lists_match_by_their_shapes) {
  const auto shaped = [](std::vector<std::int64_t> shape) {
    return TensorView{nullptr, 6, DType::kFloat32, 0, shape_word(shape)};
  };
  const TensorView flat = shaped({6});
  const TensorView two = shaped({2, 3});
  const TensorView three = shaped({3, 2});
  const auto word = [](std::vector<TensorView> list) { return list_word(list); };
  std::uint64_t common = word({flat, flat});
  CHECK(is_list(common) && matches(common, word({two, flat})));
  CHECK(common == word({two, flat}));  // what is compared with the next rank
  CHECK(matches(common, word({flat, flat})) && !matches(common, word({three, flat})));
  common = word({flat, flat});
  CHECK(!matches(common, word({flat})) && !matches(common, flat.shape));
  common = word({two, three});
  CHECK(!matches(common, word({three, two})) && !matches(common, two.shape));
}

CASE(names_of_types_go_both_ways) {
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    CHECK(dtype_from_name(name_of(dtype)) == dtype);
  }
  for (int o = 0; o < kReduceOpCount; ++o) {
    const auto op = static_cast<ReduceOp>(o);
    CHECK(reduce_op_from_name(name_of(op)) == op);
  }
  CHECK(!dtype_from_name("float31"));
  CHECK(!reduce_op_from_name(""));
}

}  // namespace
}  // namespace fastdist::test
