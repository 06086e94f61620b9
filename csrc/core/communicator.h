// What every engine implements: the collectives on views of memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <string>

#include "core/signature.h"
#include "core/types.h"

namespace fastdist {

// Who called a collective, asked only when something goes wrong or takes long.
class Caller {
 public:
  Caller() = default;
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;
  virtual ~Caller() = default;

  // The line of the user's source that made the call, or "".
  [[nodiscard]] virtual std::string location() const = 0;
  // Throws when the call should be given up (Ctrl-C).
  virtual void check_interrupt() const = 0;
  // Told, at least once, before anything that takes longer than a microsecond or two: time to let
  // go of what others may need.
  virtual void may_block() const {}
};

struct CallOptions {
  std::chrono::nanoseconds timeout;
  const Caller* caller;
  // What the ranks compare and see in messages, where this call is one step of another.
  const Signature* whole = nullptr;
  // Engines of devices: where the call takes its turn (a CUDA stream; null: the default one).
  void* stream = nullptr;
};

// One rank of a group. Every method but send and recv is called by every rank, in the same order,
// with arguments that agree; ranks that disagree all throw kMismatch and nothing has moved.
// `in` and `out` hold the same arrays, or arrays that do not overlap. One call at a time.
class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;

  virtual void all_reduce(TensorViews in, TensorViews out, ReduceOp op, const CallOptions&) = 0;
  // `out` is written on the root only.
  virtual void reduce(TensorViews in, TensorViews out, ReduceOp op, int root,
                      const CallOptions&) = 0;
  virtual void broadcast(TensorViews inout, int root, const CallOptions&) = 0;
  // `out` holds size() times the elements of `in`, in rank order.
  virtual void all_gather(TensorView in, TensorView out, const CallOptions&) = 0;
  virtual void gather(TensorView in, TensorView out, int root, const CallOptions&) = 0;
  // `in` holds size() times the elements of `out`; read on the root only.
  virtual void scatter(TensorView in, TensorView out, int root, const CallOptions&) = 0;
  virtual void reduce_scatter(TensorView in, TensorView out, ReduceOp op, const CallOptions&) = 0;
  // Rank i sends counts[i * size() + j] elements to rank j, the same table on every rank; an empty
  // table: all parts are equal.
  virtual void all_to_all(TensorView in, TensorView out, std::span<const std::size_t> counts,
                          const CallOptions&) = 0;
  virtual void send(TensorView in, int dst, const CallOptions&) = 0;
  virtual void recv(TensorView out, int src, const CallOptions&) = 0;
  virtual void barrier(const CallOptions&) = 0;
};

}  // namespace fastdist
