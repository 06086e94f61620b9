// Collectives by NCCL.
//
// Every call goes the same way: its signature is compared over the hosts (where there is a
// checker), it is entered with the watcher, its work is enqueued on the caller's stream, and its
// end is marked. NCCL orders the calls of one communicator among themselves, on whatever streams
// they are and also where some are in a captured graph, so nothing is added for that here.
//
// What NCCL lacks (reductions.h) is done by an exchange: each rank sends every other the part that
// this one will reduce, a kernel reduces in rank order, and the results go back. Lists go through
// buckets (cuda/bucket_plan.h), each packed by one launch while the one before is on its way.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "cuda/bucket_plan.h"
#include "cuda/kernels.h"
#include "nccl/engine.h"
#include "nccl/handle.h"
#include "nccl/reductions.h"
#include "nccl/scratch.h"
#include "nccl/watcher.h"

namespace fastdist::nccl {

class NcclCommunicator final : public GpuCommunicator {
 public:
  // The device is current.
  NcclCommunicator(std::shared_ptr<Handle> handle, int rank, int size, Checker* checker);
  ~NcclCommunicator() override;

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] int device() const noexcept override { return handle_->device(); }
  void check_usable() const override { handle_->check_usable(); }

  // native.cpp
  void all_reduce(TensorViews in, TensorViews out, ReduceOp op, const CallOptions&) override;
  void reduce(TensorViews in, TensorViews out, ReduceOp op, int root, const CallOptions&) override;
  void all_gather(TensorView in, TensorView out, const CallOptions&) override;
  void gather(TensorView in, TensorView out, int root, const CallOptions&) override;
  void scatter(TensorView in, TensorView out, int root, const CallOptions&) override;
  void reduce_scatter(TensorView in, TensorView out, ReduceOp op, const CallOptions&) override;
  void all_to_all(TensorView in, TensorView out, std::span<const std::size_t> counts,
                  const CallOptions&) override;
  void send(TensorView in, int dst, const CallOptions&) override;
  void recv(TensorView out, int src, const CallOptions&) override;
  void barrier(const CallOptions&) override;

  // fused.cpp
  void broadcast(TensorViews inout, int root, const CallOptions& options) override {
    broadcast_from(inout, inout, root, options);
  }
  void broadcast_from(TensorViews in, TensorViews out, int root, const CallOptions&) override;
  void all_reduce_fused(TensorViews in, TensorViews out, ReduceOp op, std::optional<DType> wire,
                        std::size_t bucket_bytes, const CallOptions&) override;

  // communicator.cpp
  void as_one(const Signature& whole, const CallOptions& options,
              const std::function<void(const CallOptions&)>& calls) override;
  [[nodiscard]] StreamHandle own_stream() const noexcept override { return own_.get(); }
  void follow(StreamHandle stream) override;
  [[nodiscard]] std::shared_ptr<const Mark> mark(StreamHandle stream) override;
  [[nodiscard]] std::shared_ptr<Memory> allocate(std::size_t bytes, const CallOptions&) override;
  void abort(const std::string& why) noexcept override;
  // Waits until the device has finished what was enqueued, or a call of it is late.
  void close() noexcept override;

 private:
  class Call;
  class Group;
  class ScratchUse;
  class OutsideGroups;

  [[nodiscard]] static StreamHandle stream_of(const CallOptions& options) noexcept {
    return static_cast<StreamHandle>(options.stream);
  }
  [[nodiscard]] Scratch& scratch() noexcept { return capturing_ ? *captured_ : eager_; }
  // What the ranks compare and see in messages.
  [[nodiscard]] static Signature told(const Signature& signature, const CallOptions& options);
  // communicator.cpp: whether `flag` is set on every rank; compares the signature on the way.
  [[nodiscard]] bool agree(const Signature& signature, const CallOptions& options, bool flag);

  // native.cpp: within a call.
  void reduce_one(const TensorView& in, const TensorView& out, ReduceOp op, std::optional<int> root,
                  const CallOptions& options);

  // exchange.cpp: within a call, of what NCCL has no reduction for.
  void exchange_reduce(const TensorView& in, const TensorView& out, ReduceOp op,
                       std::optional<int> root, const CallOptions& options);
  void exchange_reduce_scatter(const TensorView& in, const TensorView& out, ReduceOp op,
                               const CallOptions& options);
  void reduce_gathered(std::byte* gathered, std::size_t stride, std::size_t bytes, DType dtype,
                       ReduceOp op, StreamHandle stream);

  // fused.cpp
  struct Transfer;
  void move_buckets(const cuda::BucketPlan& plan, const Transfer& transfer,
                    const CallOptions& options);
  [[nodiscard]] const float* measure_all(const cuda::BucketPlan& plan, TensorViews in,
                                         const CallOptions& options);

  std::shared_ptr<Handle> handle_;
  int rank_;
  int size_;
  Checker* checker_;
  cuda::Stream own_;
  cuda::Event followed_;
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>(handle_->device());
  Scratch eager_{false};
  std::shared_ptr<Scratch> captured_ = std::make_shared<Scratch>(true);
  Watcher watcher_;
  std::shared_ptr<const Mark> last_;
  int depth_ = 0;           // calls within calls
  int group_depth_ = 0;     // of NCCL's groups that are open
  bool capturing_ = false;  // the call that runs
};

// A call from its beginning to its end; nothing of its own where it is a part of another.
class NcclCommunicator::Call {
 public:
  enum class Compared { kYes, kNo };
  Call(NcclCommunicator& communicator, const Signature& signature, const CallOptions& options,
       Compared compared = Compared::kYes);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();
  // Everything has been enqueued.
  void end();

 private:
  NcclCommunicator& c_;
  const CallOptions& options_;
  std::optional<cuda::DeviceGuard> device_;
  bool outermost_;
  bool entered_ = false;
};

// What is enqueued meanwhile is launched together, at the end of the outermost group.
class NcclCommunicator::Group {
 public:
  Group(NcclCommunicator& communicator, const CallOptions& options);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group();
  void end();

 private:
  NcclCommunicator& c_;
  const CallOptions& options_;
  bool open_ = true;
};

// What is enqueued meanwhile is launched at once, also within groups: for steps that depend on each
// other.
class NcclCommunicator::OutsideGroups {
 public:
  OutsideGroups(NcclCommunicator& communicator, const CallOptions& options);
  OutsideGroups(const OutsideGroups&) = delete;
  OutsideGroups& operator=(const OutsideGroups&) = delete;
  ~OutsideGroups();

 private:
  NcclCommunicator& c_;
  int depth_;
};

class NcclCommunicator::ScratchUse {
 public:
  ScratchUse(NcclCommunicator& communicator, StreamHandle stream)
      : scratch_(communicator.scratch()), stream_(stream) {
    scratch_.begin(stream);
  }
  ScratchUse(const ScratchUse&) = delete;
  ScratchUse& operator=(const ScratchUse&) = delete;
  void end() { scratch_.end(stream_); }
  [[nodiscard]] Scratch* operator->() const noexcept { return &scratch_; }

 private:
  Scratch& scratch_;
  StreamHandle stream_;
};

}  // namespace fastdist::nccl
