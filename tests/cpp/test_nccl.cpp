// NCCL without a GPU: versions, supported reductions.

#include "check.h"
#include "nccl/library.h"
#include "nccl/reductions.h"

namespace fastdist::test {
namespace {

CASE(old_versions_are_refused_by_number) {
  for (const int version : {22703, 22707, 22807, 23007, 30000}) nccl::check_version(version, "x");
  const auto text = [](int version) {
    return std::string(
        CHECK_THROWS(ErrorCode::kUnsupported, nccl::check_version(version, "/lib/libnccl.so.2"))
            .what());
  };
  CHECK(text(22702).find("got 2.27.2 (/lib/libnccl.so.2)") != std::string::npos);
  CHECK(text(21805).find("needs NCCL 2.27.3 or newer, got 2.18.5") != std::string::npos);
  CHECK(text(2804).find("got 2.8 or older") != std::string::npos);
}

CASE(sharing_a_gpu_depends_on_the_version) {
  CHECK(nccl::settings_for_sharing(23003, 5).contains("NCCL_MULTI_RANK_GPU_ENABLE"));
  const auto a = nccl::settings_for_sharing(22907, 1);
  const auto b = nccl::settings_for_sharing(22907, 2);
  CHECK(a.size() == 1 && a.contains("NCCL_HOSTID") && a != b);
}

// Returns the text with which a reduction is refused, or nothing.
std::string refusal_of(DType dtype, ReduceOp op) {
  try {
    (void)nccl::native_reduction(dtype, op);
    return "";
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kUnsupported);
    return error.what();
  }
}

CASE(reductions_are_native_or_refused) {
  const auto is = [](DType dtype, ReduceOp op, nccl::abi::DataType type, nccl::abi::RedOp native,
                     std::size_t per_element) {
    const nccl::NativeReduction found = nccl::native_reduction(dtype, op);
    return found.type == type && found.op == native && found.per_element == per_element;
  };
  namespace abi = nccl::abi;
  CHECK(is(DType::kFloat32, ReduceOp::kMean, abi::kFloat32, abi::kAvg, 1));
  CHECK(is(DType::kComplex128, ReduceOp::kSum, abi::kFloat64, abi::kSum, 2));
  CHECK(is(DType::kBool, ReduceOp::kSum, abi::kUint8, abi::kMax, 1));
  CHECK(is(DType::kBool, ReduceOp::kAnd, abi::kUint8, abi::kMin, 1));
  CHECK(is(DType::kUInt64, ReduceOp::kProd, abi::kUint64, abi::kProd, 1));
  CHECK(refusal_of(DType::kInt32, ReduceOp::kXor) ==
        "op=\"xor\" of int32 is not supported on GPUs, since NCCL lacks it; reduce a copy in host "
        "memory, such as x.cpu()");
}

CASE(what_nccl_lacks_is_refused_and_nothing_else) {
  for (int d = 0; d < kDTypeCount; ++d) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      try {
        check_reducible(op, dtype);
      } catch (const Error&) {
        continue;
      }
      const bool is_bool = dtype == DType::kBool;
      const bool bitwise =
          (!is_bool && (op == ReduceOp::kAnd || op == ReduceOp::kOr)) || op == ReduceOp::kXor;
      const bool narrow = dtype == DType::kInt16 || dtype == DType::kUInt16 ||
                          dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2;
      const bool complex = dtype >= DType::kComplex64 && op == ReduceOp::kProd;
      CHECK_THAT(refusal_of(dtype, op).empty() != (bitwise || narrow || complex),
                 name_of(op) << " of " << name_of(dtype));
    }
  }
}

}  // namespace
}  // namespace fastdist::test
