// The interface of an engine: the collectives on views of memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/noncopyable.h"
#include "core/recorder.h"
#include "core/signature.h"
#include "core/types.h"

namespace fastdist {

// The caller of a collective. Used only when a call fails or blocks.
class Caller : public NonCopyable {
 public:
  virtual ~Caller() = default;

  // Returns the line of the user's source that made the call, or "".
  [[nodiscard]] virtual std::string location() const = 0;
  // Returns that line's number in the recorder's file. Called before the call may block.
  [[nodiscard]] virtual std::uint16_t site() const noexcept { return recorder::kNoSite; }
  // Throws if the call should be aborted (Ctrl-C).
  virtual void check_interrupt() const = 0;
  // Called at least once before anything that takes longer than one or two microseconds: the caller
  // releases resources that others may need, such as the GIL.
  virtual void may_block() const {}
  // Returns true if no other thread of this process can make a call before this one ends.
  [[nodiscard]] virtual bool is_alone() const { return false; }
  // Returns true if no other thread can make a call of this rank; differs where ranks are threads.
  [[nodiscard]] virtual bool is_only_caller() const { return is_alone(); }
};

// How often a rank that waits looks whether others have failed.
inline constexpr std::chrono::milliseconds kPollInterval{50};

struct CallOptions {
  std::chrono::nanoseconds timeout;
  const Caller* caller;
  // The signature of the enclosing call if this call is one step of it. The ranks compare it, and
  // messages show it, instead of the step's own signature.
  const Signature* whole = nullptr;
  // The call that messages show instead, if the ranks must not compare it.
  const Signature* shown = nullptr;
  // GPU engines: the CUDA stream that the call is enqueued on; null is the default stream.
  void* stream = nullptr;
  // The tag of a send, matched by the receiver's `Inbox`.
  std::uint64_t tag = 0;
  // Where the call is recorded; null for a call that is part of another.
  recorder::Record* record = nullptr;
};

// One rank of a group. Every rank must call every method except send and recv, in the same order
// and with matching arguments. On a mismatch all ranks throw kMismatch and no data has moved. `in`
// and `out` hold the same arrays, or arrays that do not overlap. Not thread-safe.
class Communicator : public NonCopyable {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;

  virtual void all_reduce(TensorViews in, TensorViews out, ReduceOp op, const CallOptions&) = 0;
  // `out` is written on the root only.
  virtual void reduce(TensorViews in, TensorViews out, ReduceOp op, int root,
                      const CallOptions&) = 0;
  // `out` holds size() times the elements of `in`, in rank order.
  virtual void all_gather(TensorView in, TensorView out, const CallOptions&) = 0;
  virtual void gather(TensorView in, TensorView out, int root, const CallOptions&) = 0;
  // `in` holds size() times the elements of `out`; read on the root only.
  virtual void scatter(TensorView in, TensorView out, int root, const CallOptions&) = 0;
  virtual void reduce_scatter(TensorView in, TensorView out, ReduceOp op, const CallOptions&) = 0;
  // Rank i sends counts[i * size() + j] elements to rank j. `counts` is the same on every rank;
  // empty means equal parts.
  virtual void all_to_all(TensorView in, TensorView out, std::span<const std::size_t> counts,
                          const CallOptions&) = 0;
  virtual void send(TensorView in, int dst, const CallOptions&) = 0;
  virtual void recv(TensorView out, int src, const CallOptions&) = 0;
  virtual void barrier(const CallOptions&) = 0;
};

// A message that its sender has announced.
struct Message {
  DType dtype;
  std::uint64_t count;
  std::uint32_t order;
  std::uint64_t tag;
};

// A communicator on host memory, whose calls return when they have ended.
class BlockingCommunicator : public Communicator {
 public:
  virtual void broadcast(TensorViews inout, int root, const CallOptions&) = 0;
  // Throws kState if the communicator is closed, has failed or is a forked child's copy.
  virtual void check_usable() const = 0;
  // Leaves the communicator: peers that wait for this rank throw kPeerFailure. Wakes this rank's
  // calls in other threads.
  virtual void close() noexcept = 0;
  // Counts calls that were submitted to run in another thread and have not ended. While there are
  // any, this rank may still act although its caller waits.
  virtual void count_submitted(int change) noexcept = 0;
  // Returns the next message from `src`, if there is one that was not received.
  [[nodiscard]] virtual std::optional<Message> find_message(int src) = 0;
  // Waits for the next message from `src`. `out` is what receives, for errors.
  [[nodiscard]] virtual Message await_message(int src, TensorView out, const CallOptions&) = 0;
  // Returns a rank that has died or failed. Thread-safe.
  [[nodiscard]] virtual std::optional<int> find_lost() const noexcept = 0;
  // Returns true if rank p has closed its communicator. Thread-safe.
  [[nodiscard]] virtual bool has_closed(int p) const noexcept = 0;
  // Allocates memory that calls use with the fewest copies.
  [[nodiscard]] virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
};

}  // namespace fastdist
