// Lists of arrays, through buckets.
//
//   side stream     P0 P1    U0 P2    U1 P3 …      P packs, U unpacks bucket k, T transfers it
//   caller's           T0       T1       T2 …
//
// The side stream packs the next bucket while the caller's stream transfers the current one. Two
// buckets suffice, because the side stream runs P2 after U0. A single bucket needs no side stream
// and no event.
//
// Arrays that are too large for a bucket are transferred last: all memory is allocated before any
// array changes.

#include <algorithm>
#include <functional>

#include "nccl/communicator.h"

namespace fastdist::nccl {

struct NcclCommunicator::Transfer {
  TensorViews in;                             // arrays to pack; empty: none
  TensorViews out;                            // arrays to unpack into; empty: none
  std::function<bool(DType bucket)> divides;  // unpacked values are divided by the number of ranks
  std::function<void(const TensorView& bucket)> run;
};

void NcclCommunicator::move_buckets(const cuda::BucketPlan& plan, const Transfer& transfer,
                                    const CallOptions& options) {
  const OutsideGroups outside(*this);
  const auto& buckets = plan.buckets;
  if (buckets.empty()) return;
  const StreamHandle stream = stream_of(options);
  ScratchUse scratch(*this, stream);
  std::size_t largest = 0;
  for (const cuda::Bucket& bucket : buckets) largest = std::max(largest, bucket.bytes);
  std::byte* memory[2] = {};
  const std::size_t needed = std::min<std::size_t>(buckets.size(), 2);
  for (std::size_t i = 0; i < needed; ++i) {
    memory[i] = scratch->bucket(i, largest, handle_, options, checker_);
  }

  Scratch::Lane* const lane = buckets.size() > 1 ? &scratch.fork() : nullptr;
  const StreamHandle side = lane != nullptr ? lane->side.get() : stream;
  const auto cast_of = [&](const cuda::Bucket& bucket) {
    const float factor = transfer.divides(bucket.dtype) ? 1.0F / static_cast<float>(size_) : 1.0F;
    return cuda::Cast{bucket.dtype, factor};
  };
  const auto fill = [&](std::size_t k) {
    if (!transfer.in.empty()) {
      const cuda::Moves moves = cuda::moves_of(buckets[k], transfer.in);
      cuda::pack(moves, memory[k % 2], cast_of(buckets[k]), side);
    }
    if (lane != nullptr) lane->packed[k % 2].record(side);
  };

  fill(0);
  for (std::size_t k = 0; k < buckets.size(); ++k) {
    if (k + 1 < buckets.size()) fill(k + 1);
    if (lane != nullptr) lane->packed[k % 2].make_wait(stream);
    const DType dtype = buckets[k].dtype;
    transfer.run({memory[k % 2], buckets[k].bytes / size_of(dtype), dtype, 0});
    if (lane != nullptr) {
      lane->moved[k % 2].record(stream);
      lane->moved[k % 2].make_wait(side);
    }
    if (!transfer.out.empty()) {
      const cuda::Moves moves = cuda::moves_of(buckets[k], transfer.out);
      cuda::unpack(moves, memory[k % 2], cast_of(buckets[k]), side);
    }
  }
  scratch.end();
}

namespace {

// Returns true for means that are sent as sums, and divided when they are unpacked: NCCL sums in
// NVLink's switches, but averages there in newer versions only. A sum of float16 could overflow.
bool is_sent_as_sum(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kBFloat16; }

}  // namespace

void NcclCommunicator::all_reduce_fused(TensorViews in, TensorViews out, ReduceOp op,
                                        std::optional<DType> wire, std::size_t bucket_bytes,
                                        const CallOptions& options) {
  Signature signature = signature_of({.op = Op::kAllReduce, .reduce_op = op, .compress = wire}, in);
  // Ranks with different buckets would wait for each other forever.
  if (in.size() > 1 && bucket_bytes != kDefaultBucketBytes) {
    signature.list ^= bucket_bytes * 0x9E3779B97F4A7C15ULL & ~(kListShapes | 1);
  }
  Call call(*this, signature, options);
  if (in.size() == 1 && !wire) {
    reduce_one(in[0], out[0], op, std::nullopt, options);
  } else {
    const cuda::BucketPlan plan = cuda::plan_buckets(in, wire, bucket_bytes);
    const auto divides = [&](DType dtype) {
      return op == ReduceOp::kMean && (wire || is_sent_as_sum(dtype));
    };
    const auto sent_as = [&](DType dtype) { return divides(dtype) ? ReduceOp::kSum : op; };
    move_buckets(plan,
                 {in, out, divides,
                  [&](const TensorView& bucket) {
                    reduce_one(bucket, bucket, sent_as(bucket.dtype), std::nullopt, options);
                  }},
                 options);
    if (!plan.alone.empty()) {
      Group alone(*this);
      for (const std::size_t i : plan.alone) reduce_one(in[i], out[i], op, std::nullopt, options);
      alone.end();
    }
  }
  call.end();
}

void NcclCommunicator::broadcast(TensorViews in, TensorViews out, int root,
                                 const CallOptions& options) {
  const Signature signature = signature_of(rooted(Op::kBroadcast, root), out);
  const auto send = [&](const TensorView& from, const TensorView& to) {
    if (to.count == 0) return;
    enqueue(functions().broadcast, "ncclBroadcast", options, from.data, to.data, to.bytes(),
            abi::kUint8, root);
  };
  Call call(*this, signature, options);
  if (in.size() == 1) {
    send(in[0], out[0]);
  } else {
    const cuda::BucketPlan plan = cuda::plan_buckets(in, std::nullopt, kDefaultBucketBytes);
    const bool is_root = rank_ == root;
    const bool in_place = in.data() == out.data();
    move_buckets(
        plan,
        {is_root ? in : TensorViews{}, is_root && in_place ? TensorViews{} : out,
         [](DType) { return false; }, [&](const TensorView& bucket) { send(bucket, bucket); }},
        options);
    if (!plan.alone.empty()) {
      Group alone(*this);
      for (const std::size_t i : plan.alone) send(in[i], out[i]);
      alone.end();
    }
  }
  call.end();
}

}  // namespace fastdist::nccl
