// The collectives that NCCL has, and those made of its sends and receives.

#include <thread>

#include "nccl/communicator.h"

namespace fastdist::nccl {

void NcclCommunicator::give(const std::byte* data, std::size_t bytes, int to,
                            const CallOptions& options) {
  if (bytes == 0) return;
  enqueue(functions().send, "ncclSend", options, data, bytes, abi::kUint8, to);
}

void NcclCommunicator::take(std::byte* data, std::size_t bytes, int from,
                            const CallOptions& options) {
  if (bytes == 0) return;
  enqueue(functions().recv, "ncclRecv", options, data, bytes, abi::kUint8, from);
}

void NcclCommunicator::reduce_one(const TensorView& in, const TensorView& out, ReduceOp op,
                                  std::optional<int> root, const CallOptions& options) {
  if (in.count == 0) return;
  const auto [type, native, per_element] = native_reduction(in.dtype, op);
  const std::size_t count = in.count * per_element;
  if (root) {
    enqueue(functions().reduce, "ncclReduce", options, in.data, out.data, count, type, native,
            *root);
  } else {
    enqueue(functions().all_reduce, "ncclAllReduce", options, in.data, out.data, count, type,
            native);
  }
}

void NcclCommunicator::all_reduce(TensorViews in, TensorViews out, ReduceOp op,
                                  const CallOptions& options) {
  all_reduce_fused(in, out, op, std::nullopt, kDefaultBucketBytes, options);
}

void NcclCommunicator::reduce(TensorViews in, TensorViews out, ReduceOp op, int root,
                              const CallOptions& options) {
  Call call(*this, signature_of(rooted(Op::kReduce, root, op), in), options);
  Group group(*this);
  for (std::size_t i = 0; i < in.size(); ++i) {
    reduce_one(in[i], rank_ == root ? out[i] : in[i], op, root, options);
  }
  group.end();
  call.end();
}

void NcclCommunicator::all_gather(TensorView in, TensorView out, const CallOptions& options) {
  Call call(*this, signature_of({.op = Op::kAllGather}, {&in, 1}), options);
  if (in.count != 0) {
    enqueue(functions().all_gather, "ncclAllGather", options, in.data, out.data, in.bytes(),
            abi::kUint8);
  }
  call.end();
}

void NcclCommunicator::gather(TensorView in, TensorView out, int root, const CallOptions& options) {
  Call call(*this, signature_of(rooted(Op::kGather, root), {&in, 1}), options);
  const abi::Functions& f = functions();
  const std::size_t bytes = in.bytes();
  if (bytes != 0) {
    Group group(*this);
    if (f.gather != nullptr) {
      enqueue(f.gather, "ncclGather", options, in.data, out.data, bytes, abi::kUint8, root);
    } else {
      give(in.data, bytes, root, options);
      for (int p = 0; p < size_ && rank_ == root; ++p) {
        take(out.data + static_cast<std::size_t>(p) * bytes, bytes, p, options);
      }
    }
    group.end();
  }
  call.end();
}

void NcclCommunicator::scatter(TensorView in, TensorView out, int root,
                               const CallOptions& options) {
  Call call(*this, signature_of(rooted(Op::kScatter, root), {&out, 1}), options);
  const abi::Functions& f = functions();
  const std::size_t bytes = out.bytes();
  if (bytes != 0) {
    Group group(*this);
    if (f.scatter != nullptr) {
      enqueue(f.scatter, "ncclScatter", options, in.data, out.data, bytes, abi::kUint8, root);
    } else {
      for (int p = 0; p < size_ && rank_ == root; ++p) {
        give(in.data + static_cast<std::size_t>(p) * bytes, bytes, p, options);
      }
      take(out.data, bytes, root, options);
    }
    group.end();
  }
  call.end();
}

void NcclCommunicator::reduce_scatter(TensorView in, TensorView out, ReduceOp op,
                                      const CallOptions& options) {
  Call call(*this, signature_of({.op = Op::kReduceScatter, .reduce_op = op}, {&in, 1}), options);
  if (out.count != 0) {
    const auto [type, native, per_element] = native_reduction(in.dtype, op);
    enqueue(functions().reduce_scatter, "ncclReduceScatter", options, in.data, out.data,
            out.count * per_element, type, native);
  }
  call.end();
}

void NcclCommunicator::all_to_all(TensorView in, TensorView out,
                                  std::span<const std::size_t> counts, const CallOptions& options) {
  Call call(*this, all_to_all_signature({&in, 1}, counts), options);
  const abi::Functions& f = functions();
  const auto n = static_cast<std::size_t>(size_);
  const auto r = static_cast<std::size_t>(rank_);
  const std::size_t item = size_of(in.dtype);
  Group group(*this);
  if (counts.empty() && f.all_to_all != nullptr) {
    if (in.count != 0) {
      enqueue(f.all_to_all, "ncclAlltoAll", options, in.data, out.data, in.bytes() / n,
              abi::kUint8);
    }
  } else {
    std::size_t sent = 0;
    std::size_t received = 0;
    for (std::size_t p = 0; p < n; ++p) {
      const std::size_t gives = (counts.empty() ? in.count / n : counts[r * n + p]) * item;
      const std::size_t takes = (counts.empty() ? in.count / n : counts[p * n + r]) * item;
      give(in.data + sent, gives, static_cast<int>(p), options);
      take(out.data + received, takes, static_cast<int>(p), options);
      sent += gives;
      received += takes;
    }
  }
  group.end();
  call.end();
}

// Only two ranks take part, so the checker of all ranks cannot compare the call. NCCL numbers the
// ranks of a lane 0 and 1.
void NcclCommunicator::send(TensorView in, int dst, const CallOptions& options) {
  Call call(*this, signature_of(rooted(Op::kSend, dst), {&in, 1}), options, Call::Compared::kNever);
  give(in.data, in.bytes(), lane_ ? 1 : dst, options);
  call.end();
}

void NcclCommunicator::recv(TensorView out, int src, const CallOptions& options) {
  Call call(*this, signature_of(rooted(Op::kRecv, src), {&out, 1}), options,
            Call::Compared::kNever);
  take(out.data, out.bytes(), lane_ ? 0 : src, options);
  call.end();
}

// Blocks the host. The comparison of signatures already is a barrier of the hosts; without a
// checker this waits for the own device only, which suffices for a single rank.
void NcclCommunicator::barrier(const CallOptions& options) {
  Call call(*this, {.op = Op::kBarrier}, options, Call::Compared::kFirst);
  call.end();
  if (checker_ != nullptr || capture_) return;
  const auto end = mark(stream_of(options));
  while (!end->is_done()) {
    check_usable();  // the watcher aborts the communicator on timeout
    options.caller->check_interrupt();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace fastdist::nccl
