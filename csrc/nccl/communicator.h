// Collectives through NCCL.
//
// Every call has the same steps: it is entered in the watcher, its work is enqueued on the caller's
// stream, its end is marked, and meanwhile its signature is compared through the hosts (if there is
// a checker). If ranks differ, the communicator is aborted and every later call throws the
// mismatch. NCCL orders the calls of one communicator, also across streams and captured graphs, so
// no ordering is added here.
//
// Lists go through buckets (cuda/bucket_plan.h): one launch packs the next bucket while the current
// one is transferred.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "cuda/bucket_plan.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "cuda/range.h"
#include "nccl/engine.h"
#include "nccl/handle.h"
#include "nccl/memory.h"
#include "nccl/reductions.h"
#include "nccl/watcher.h"

namespace fastdist::nccl {

class NcclCommunicator final : public GpuCommunicator {
 public:
  // `handle`'s device must be current.
  NcclCommunicator(std::shared_ptr<Handle> handle, const Connection& connection);
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
  void broadcast(TensorViews in, TensorViews out, int root, const CallOptions&) override;
  void all_reduce_fused(TensorViews in, TensorViews out, ReduceOp op, std::optional<DType> wire,
                        std::size_t bucket_bytes, const CallOptions&) override;

  // communicator.cpp
  void as_one(const Signature& whole, const CallOptions& options,
              const std::function<void(const CallOptions&)>& calls) override;
  void as_group(const CallOptions& options, const std::function<void()>& calls) override;
  [[nodiscard]] StreamHandle own_stream() const noexcept override { return own_.get(); }
  void follow(StreamHandle stream) override;
  [[nodiscard]] std::shared_ptr<const Mark> mark(StreamHandle stream) override;
  [[nodiscard]] std::shared_ptr<Mark> record(StreamHandle stream) override;
  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes, const CallOptions&) override;
  void share_failures(GpuCommunicator& other) override;
  void abort(const std::string& why) noexcept override;
  // Waits until the device has finished all enqueued work, or until a call times out.
  void close() noexcept override;

 private:
  class Call;
  class Group;
  // Makes calls and ends their group. NCCL also launches the calls made before an exception, so
  // they are watched like all others.
  static void end_after(Call& call, Group& group, const std::function<void()>& calls);
  class ScratchUse;
  class OutsideGroups;

  [[nodiscard]] static StreamHandle stream_of(const CallOptions& options) noexcept {
    return static_cast<StreamHandle>(options.stream);
  }
  // Returns true if a call that begins now is the user's own: not nested, except in a group.
  [[nodiscard]] bool is_users_call() const noexcept { return depth_ == (is_group_ ? 1 : 0); }
  // Returns the scratch memory of the current call.
  [[nodiscard]] Scratch& scratch() { return capture_ ? captured_scratch() : eager_; }
  [[nodiscard]] Scratch& captured_scratch();
  // Returns the signature that the ranks compare and that messages show.
  [[nodiscard]] static Signature announced_signature(const Signature& signature,
                                                     const CallOptions& options);

  // Must be called within a call. The last parameters of NCCL's function are the communicator and
  // the stream.
  template <class Function, class... Arguments>
  void enqueue(Function* function, const char* name, const CallOptions& options,
               Arguments... arguments) {
    handle_->check(function(arguments..., handle_->get(), stream_of(options)), name);
  }

  // native.cpp: must be called within a call.
  void give(const std::byte* data, std::size_t bytes, int to, const CallOptions& options);
  void take(std::byte* data, std::size_t bytes, int from, const CallOptions& options);
  void reduce_one(const TensorView& in, const TensorView& out, ReduceOp op, std::optional<int> root,
                  const CallOptions& options);

  // fused.cpp
  struct Transfer;
  void move_buckets(const cuda::BucketPlan& plan, const Transfer& transfer,
                    const CallOptions& options);

  std::shared_ptr<Handle> handle_;
  int rank_;
  int size_;
  std::optional<Lane> lane_;
  Checker* checker_;  // null for lanes
  cuda::Stream own_;
  cuda::Event followed_;
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>(handle_->device());
  Scratch eager_{false};
  std::map<cuda::CaptureId, std::shared_ptr<Scratch>> captured_;
  Watcher watcher_;
  std::shared_ptr<const Mark> last_;
  int depth_ = 0;                           // nesting of calls
  int group_depth_ = 0;                     // number of open NCCL groups
  bool is_group_ = false;                   // in `as_group`, whose calls are compared one by one
  std::optional<cuda::CaptureId> capture_;  // of the current call
};

// A call from beginning to end. Does nothing if it is nested in another call, except for the
// comparison in `as_group`.
class NcclCommunicator::Call {
 public:
  enum class Compared { kLater, kFirst, kNever };
  Call(NcclCommunicator& communicator, const Signature& signature, const CallOptions& options,
       Compared compared = Compared::kLater);
  ~Call();
  // Must be called after all work has been enqueued.
  void end();

 private:
  NcclCommunicator& c_;
  const CallOptions& options_;
  std::optional<cuda::DeviceGuard> device_;
  Handle::Use use_;
  std::optional<cuda::Range> range_;
  bool outermost_;
  bool entered_ = false;
};

// An NCCL group: its work is launched together, at the end of the outermost group.
class NcclCommunicator::Group : NonCopyable {
 public:
  explicit Group(NcclCommunicator& communicator);
  ~Group();
  void end();

 private:
  NcclCommunicator& c_;
  bool open_ = true;
};

// Suspends open groups, so that work is launched immediately: for steps that depend on each other.
class NcclCommunicator::OutsideGroups : NonCopyable {
 public:
  explicit OutsideGroups(NcclCommunicator& communicator);
  ~OutsideGroups();

 private:
  NcclCommunicator& c_;
  int depth_;
};

// A use of the scratch memory on `stream`. After an error, it still lasts until its work finishes.
class NcclCommunicator::ScratchUse : NonCopyable {
 public:
  ScratchUse(NcclCommunicator& communicator, StreamHandle stream)
      : scratch_(communicator.scratch()), stream_(stream) {
    scratch_.begin(stream);
  }
  ~ScratchUse() {
    if (has_ended_) return;
    try {
      end();
    } catch (const Error&) {
      return;  // the first error is the one to throw
    }
  }
  // Makes the side stream wait for the work on `stream`. `end` makes `stream` wait in turn.
  [[nodiscard]] Scratch::Lane& fork() {
    lane_ = &scratch_.lane();
    lane_->start.record(stream_);
    lane_->start.make_wait(lane_->side.get());
    return *lane_;
  }
  void end() {
    has_ended_ = true;
    if (lane_ != nullptr) {
      lane_->end.record(lane_->side.get());
      lane_->end.make_wait(stream_);
    }
    scratch_.end(stream_);
  }
  [[nodiscard]] Scratch* operator->() const noexcept { return &scratch_; }

 private:
  Scratch& scratch_;
  StreamHandle stream_;
  Scratch::Lane* lane_ = nullptr;
  bool has_ended_ = false;
};

}  // namespace fastdist::nccl
